"""Programs around the library: they import it, and it never imports them."""
