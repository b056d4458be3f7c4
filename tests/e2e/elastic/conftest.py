"""Jobs of the tests beside this file; the run that they compare themselves with is made once."""

from tests.support.training_runs import reference_steps, training_run

__all__ = ["reference_steps", "training_run"]
