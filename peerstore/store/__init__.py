"""One node's shards in memory: lease, write, seal, read, evict, and recovery after a restart."""
