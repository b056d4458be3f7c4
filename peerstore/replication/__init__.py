"""Replicas of this node's shards on other nodes: placement, policy, transfer, commit."""
