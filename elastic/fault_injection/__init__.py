"""Fault injection: faults as values, their execution, and the hooks that trigger them.

::

    faults = FaultPlan(seed=1).at(step=30, rank=1).sigkill().then(phase="recovery", rank=0).segfault()
    subprocess.run(["elastic", "run", ..., "train.py"], env=os.environ | faults.environ())

``elastic inject`` injects faults into a running job.
"""

from elastic.fault_injection.fault_spec import FaultInjection, FaultPlan, InjectionKind, InjectionPhase

__all__ = ["FaultInjection", "FaultPlan", "InjectionKind", "InjectionPhase"]
