"""Goodput: how much of a job's time was, or will be, work that stays."""
