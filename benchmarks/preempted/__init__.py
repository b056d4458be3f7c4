"""A job that nodes are taken from and given back to for minutes, and the picture that its own ranks' records make."""
