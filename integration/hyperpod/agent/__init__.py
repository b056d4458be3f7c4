"""A rank under HyperPod's elastic agent: what it hears from it, and what it tells it."""
