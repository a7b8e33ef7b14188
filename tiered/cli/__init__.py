"""The ``tiered`` command."""
