"""A stored step as files that other programs read: tensor by tensor, never the whole model in memory."""
