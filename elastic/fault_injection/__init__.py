"""Fault injection: faults as values, their execution, and the hooks that trigger them.

::

    faults = Faults(seed=1).at(step=30, rank=1).sigkill().then(phase="recovery", rank=0).segfault()
    subprocess.run(["elastic", "run", ..., "train.py"], env=os.environ | faults.environ())

``elastic inject`` does the same to a job that runs already.
"""

from elastic.fault_injection.fault_spec import FaultInjection, FaultPlan, InjectionKind, InjectionPhase

__all__ = ["FaultInjection", "FaultPlan", "InjectionKind", "InjectionPhase"]
