"""Messages between nodes: a header each, and bytes behind it that nobody copies on the way."""
