"""A rank's half of elastic training: the loop that enters every world, and the handle by which it is left together."""
