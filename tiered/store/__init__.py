"""``TieredStore`` and its parts: leases, commits, opening, stores at rest, verification."""
