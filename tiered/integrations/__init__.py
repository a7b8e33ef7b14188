"""Adapters to training libraries, each in a file that alone imports its library."""
