"""Training side of elastic jobs: the loop that enters worlds, and the :class:`World` handle."""
