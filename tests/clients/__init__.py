"""Test suites of libraries that use this one, in memory and with their tensors in a store: ``python -m tests.clients``."""
