"""The same state at another number of ranks, verified by a sharding-independent checksum."""
