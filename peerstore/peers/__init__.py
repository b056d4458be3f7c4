"""What one node's agent does with the agents of other nodes: keep copies there, take theirs, read from all of them."""
