"""Tables: rows by number in blocks of a store."""
