"""Slurm is asked which machines a job still has, and to put a job back into its queue."""

from __future__ import annotations

import subprocess

from elastic.errors import PolicyError
from elastic.schedulers.hostlist import host_names

_WITHIN_S = 60.0


def nodes_left(job: str) -> tuple[str, ...]:
    """The machines of a job that runs, without those that Slurm has lost; () where that is not known."""
    code, said = _said("squeue", "--noheader", "--jobs", job, "--states", "RUNNING", "--format", "%N")
    try:
        return host_names(said) if said and not code else ()
    except PolicyError:
        return ()


def requeued(job: str) -> str:
    """Ask for it; what came of it, in words. Slurm ends whatever still runs of the job."""
    code, said = _said("scontrol", "requeue", job)
    if not code:
        return f"Slurm's job {job} is back in the queue"
    return f"Slurm's job {job} is not back in the queue: {said}; where it may be, write: scontrol requeue {job}"


def _said(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout if not done.returncode else done.stderr).strip()
