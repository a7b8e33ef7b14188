"""Choices that are made while a training runs, from what was measured: a linear program, and who follows its result."""
