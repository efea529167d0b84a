"""Exchange of codes between workers; read `step` first, then the files in the order of the data."""
