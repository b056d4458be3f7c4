"""The supervisor process, which starts, watches and ends the ranks of one node."""
