"""Redundancy of a job's steps, and the step it would resume from after losing nodes. Pure."""
