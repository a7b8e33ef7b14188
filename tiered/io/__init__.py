"""Parts that move bytes between memory and files."""
