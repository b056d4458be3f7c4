"""Client of the node agent for local processes."""
