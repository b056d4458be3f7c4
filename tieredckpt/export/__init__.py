"""Export of a stored step to files for other programs, tensor by tensor."""
