"""XOR parity across groups of nodes, an alternative to full replicas."""
