"""Compiled programs, read from XLA's own text: what each collective sends, and who wrote it."""
