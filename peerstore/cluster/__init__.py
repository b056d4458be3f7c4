"""Which nodes there are, where copies belong, and who is alive: decisions, and the lists they start from."""
