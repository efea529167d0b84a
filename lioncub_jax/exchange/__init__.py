"""Exchange of codes between workers; read `step` first, then `plan`."""
