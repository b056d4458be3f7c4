"""Other people's platforms, one package each. Nothing below imports them."""
