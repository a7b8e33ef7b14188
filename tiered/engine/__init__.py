"""The engine: decides what moves between tiers, and when."""
