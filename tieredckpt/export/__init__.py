"""A stored step as files for other programs, tensor by tensor."""
