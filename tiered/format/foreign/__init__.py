"""Files of other programs, read in bounded time and memory, and without running anything in them."""
