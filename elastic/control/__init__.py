"""Who tells the ranks which world they are in: one seam, and the embedded control plane behind it."""
