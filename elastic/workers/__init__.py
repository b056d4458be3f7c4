"""A rank's side of elastic training: the loop that enters worlds, and the handle it trains with."""
