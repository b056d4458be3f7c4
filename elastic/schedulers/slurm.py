"""``SLURM_*``: what Slurm says in a step, in a batch script and in a shell of ``salloc``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic.errors import PolicyError
from elastic.schedulers.allocation import Allocation
from elastic.schedulers.hostlist import host_names

_NOT_A_STEP = 0xFFFFFFF0
"""From here on a step's number means a batch script, an interactive shell and the like."""
_FIRST_PORT, _PORTS, _STEPS = 20_000, 12_000, 8
"""Below the ports that the kernel gives to whoever connects. Steps of a job have neighbouring ones."""
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", re.ASCII)


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job this process is in, or ``None`` outside of any."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    if not _is_number(job):
        raise PolicyError(f"$SLURM_JOB_ID={job!r} is not a number")
    step = environ.get("SLURM_STEP_ID", "")
    if _is_number(step) and int(step) < _NOT_A_STEP and environ.get("SLURM_STEP_NODELIST"):
        return _in_step(environ, int(job), int(step))
    listed = environ.get("SLURM_JOB_NODELIST", "")
    count = len(host_names(listed)) if listed else 1
    return Allocation(f"Slurm's job {job} ($SLURM_JOB_NODELIST={listed})", count, count, run=job, in_step=False)


def _in_step(environ: Mapping[str, str], job: int, step: int) -> Allocation:
    """The nodes of the step, which may be fewer than the job's."""
    listed = environ["SLURM_STEP_NODELIST"]
    nodes, said = host_names(listed), f"$SLURM_STEP_NODELIST={listed}"
    count = environ.get("SLURM_STEP_NUM_NODES", str(len(nodes)))
    if count != str(len(nodes)):
        raise PolicyError(f"{said} has {len(nodes)} names, and $SLURM_STEP_NUM_NODES={count}")
    if len({*nodes}) < len(nodes):
        raise PolicyError(f"{said} names a node twice")
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise PolicyError(
            f"$SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}: in a heterogeneous job, run `elastic run` in one of its "
            "components: srun --het-group=0 with SLURM_HET_SIZE unset"
        )
    _one_task_each(environ, len(nodes))
    node = environ.get("SLURMD_NODENAME", "")
    if node not in nodes:
        raise PolicyError(f"$SLURMD_NODENAME={node} is not in {said}")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    cluster = re.sub(r"[^A-Za-z0-9_-]", "-", environ.get("SLURM_CLUSTER_NAME", "slurm"))[:40]
    return Allocation(
        said,
        least=len(nodes),
        most=len(nodes),
        nproc=int(gpus) if _is_number(gpus) and int(gpus) else None,
        node=node,
        nodes=nodes,
        host=nodes[0],
        port=_FIRST_PORT + (job * _STEPS + step % _STEPS) % _PORTS,
        leads=node == nodes[0],
        run=str(job),
        agreement=f"{cluster}-{job}.{step}-{restarts if _is_number(restarts) else 0}",
        notices=True,
    )


def _one_task_each(environ: Mapping[str, str], nodes: int) -> None:
    said = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    found = [_TASKS.fullmatch(one) for one in said.split(",")]
    if not all(found):
        raise PolicyError(f"$SLURM_STEP_TASKS_PER_NODE={said!r} cannot be read: expected as in 2(x3),1")
    tasks = max(int(one[1]) for one in found if one is not None)
    if tasks != 1:
        raise PolicyError(
            f"$SLURM_STEP_TASKS_PER_NODE={said}: `elastic run` is started once on every node, and starts the node's "
            f"ranks itself. Write: srun --nodes={nodes} --ntasks={nodes} elastic run --nproc {tasks} ..."
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
