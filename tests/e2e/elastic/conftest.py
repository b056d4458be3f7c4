"""Jobs for the tests in this directory, and the reference run that they share."""

from tests.support.training_runs import reference_steps, training_run

__all__ = ["reference_steps", "training_run"]
