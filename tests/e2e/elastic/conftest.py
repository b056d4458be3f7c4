"""Jobs of the tests beside this file; the run that they compare themselves with is made once."""

from tests.support.training_runs import story, undisturbed

__all__ = ["story", "undisturbed"]
