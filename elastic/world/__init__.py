"""Decisions about the ranks of a job: state and event in, state and actions out. Pure."""
