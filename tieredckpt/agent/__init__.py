"""The node agent's half of checkpoints: drain, catalog, step inventory, HTTP. No torch."""
