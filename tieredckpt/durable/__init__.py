"""The durable tier: objects under a URL, and how shards get there and back."""
