"""The ``tiered`` command: each module parses options, calls the library and prints."""
