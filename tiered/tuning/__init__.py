"""Choices that are made while a training runs, from what was measured: the best assignment found, and who follows it."""
