"""Calls between the node agents of a job: heartbeats, replicas, ranged reads, inventory."""
