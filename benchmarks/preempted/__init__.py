"""A job whose nodes are preempted and returned for minutes, and a figure from its records."""
