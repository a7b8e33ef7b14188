"""Optimizers whose states are in a store, of paged parameters and of those that stay in memory."""
