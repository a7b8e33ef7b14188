"""Use paged models with other libraries. Each file imports one of them, and nothing in ``tiered`` imports the file."""
