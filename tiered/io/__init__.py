"""I/O backends: they move bytes between memory and files."""
