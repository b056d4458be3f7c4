"""Faults on purpose: what is to happen at which rank and when, and what carries it out.

::

    faults = Faults(seed=1).at(step=30, rank=1).sigkill().then(phase="recovery", rank=0).segfault()
    subprocess.run(["elastic", "run", ..., "train.py"], env=os.environ | faults.environ())

``elastic inject`` does the same to a job that runs already.
"""

from elastic.inject.faults import Faults
from elastic.inject.plan import Injection, Kind, Phase

__all__ = ["Faults", "Injection", "Kind", "Phase"]
