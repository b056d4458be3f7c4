"""One step's samples, shared out among the ranks there are. Pure: values in, values out, no torch."""
