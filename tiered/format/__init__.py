"""Read and write what is on disk."""
