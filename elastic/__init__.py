"""Training that goes on when the world changes: any number of ranks, the same batch, no sample lost.

Nothing here imports torch until it is needed.
"""
