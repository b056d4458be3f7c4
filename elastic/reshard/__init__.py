"""The same state at another number of ranks: proved by a checksum that does not depend on who holds what."""
