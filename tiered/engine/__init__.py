"""Decide what moves between tiers, and when."""
