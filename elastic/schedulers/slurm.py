"""Slurm: host lists, variables of jobs and steps, and the commands ``squeue`` and ``scontrol``."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
from collections.abc import Mapping
from typing import TypeAlias

from elastic.control.control_messages import MAX_NODES
from elastic.errors import PolicyError
from elastic.schedulers.allocation import SchedulerAllocation

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)


_Numbers: TypeAlias = tuple[range, int]
"""Numbers and their minimum count of digits."""
_Piece: TypeAlias = "tuple[_Numbers, ...] | str"


def parse_host_list(text: str, *, most: int = MAX_NODES) -> tuple[str, ...]:
    """Return the names of a host list in order.

    Raise :class:`PolicyError` if ``text`` is not a host list or has more than ``most`` names. The names are counted
    before any of them is created.
    """
    items = [_pieces(item, text) for item in _items(text)]
    count = sum(math.prod(_count(piece) for piece in pieces) for pieces in items)
    if count > most:
        raise PolicyError(f"host list {_quote(text)} has {count} names: a job has {most} nodes at the most")
    return tuple("".join(parts) for pieces in items for parts in itertools.product(*map(_expand, pieces)))


def _items(text: str) -> list[str]:
    """Split ``text`` at the commas outside brackets."""
    found, at = [], 0
    while True:
        item = _ITEM.match(text, at)
        if item is None or (item.end() < len(text) and text[item.end()] != ","):
            raise _invalid_list(text)
        found.append(item[0])
        if item.end() == len(text):
            return found
        at = item.end() + 1


def _pieces(item: str, text: str) -> list[_Piece]:
    return [plain or tuple(_range(part, text) for part in ranges.split(",")) for ranges, plain in _PIECE.findall(item)]


def _range(part: str, text: str) -> _Numbers:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise _invalid_list(text)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise PolicyError(f"host list {_quote(text)}: {part} counts backwards")
    return range(first, last + 1), len(found[1])


def _count(piece: _Piece) -> int:
    return 1 if isinstance(piece, str) else sum(numbers.stop - numbers.start for numbers, _ in piece)


def _expand(piece: _Piece) -> list[str]:
    if isinstance(piece, str):
        return [piece]
    return [f"{number:0{width}d}" for numbers, width in piece for number in numbers]


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _invalid_list(text: str) -> PolicyError:
    return PolicyError(f"{_quote(text)} is no host list: expected names as in n[1-3,07],gpu-[01-04]x")


_NOT_A_STEP = 0xFFFFFFF0
"""First of the step numbers that mean a batch script, an interactive shell or similar."""
_FIRST_PORT, _PORTS, _STEPS = 20_000, 12_000, 8
"""Ports of coordinators, below the kernel's ephemeral ports. Steps of one job have adjacent ports."""
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", re.ASCII)


def slurm_allocation(environ: Mapping[str, str]) -> SchedulerAllocation | None:
    """Return the allocation of this process's Slurm job; ``None`` outside a job."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    if not _is_number(job):
        raise PolicyError(f"$SLURM_JOB_ID={job!r} is not a number")
    step = environ.get("SLURM_STEP_ID", "")
    if _is_number(step) and int(step) < _NOT_A_STEP and environ.get("SLURM_STEP_NODELIST"):
        return _step_allocation(environ, int(job), int(step))
    listed = environ.get("SLURM_JOB_NODELIST", "")
    count = len(parse_host_list(listed)) if listed else 1
    return SchedulerAllocation(
        f"Slurm's job {job} ($SLURM_JOB_NODELIST={listed})", count, count, run=job, in_step=False
    )


def _step_allocation(environ: Mapping[str, str], job: int, step: int) -> SchedulerAllocation:
    """Return the allocation of a step, which may have fewer nodes than the job."""
    listed = environ["SLURM_STEP_NODELIST"]
    nodes, said = parse_host_list(listed), f"$SLURM_STEP_NODELIST={listed}"
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
    _check_one_task_per_node(environ, len(nodes))
    node = environ.get("SLURMD_NODENAME", "")
    if node not in nodes:
        raise PolicyError(f"$SLURMD_NODENAME={node} is not in {said}")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    cluster = re.sub(r"[^A-Za-z0-9_-]", "-", environ.get("SLURM_CLUSTER_NAME", "slurm"))[:40]
    return SchedulerAllocation(
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


def _check_one_task_per_node(environ: Mapping[str, str], nodes: int) -> None:
    said = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    found = [_TASKS.fullmatch(item) for item in said.split(",")]
    if not all(found):
        raise PolicyError(f"$SLURM_STEP_TASKS_PER_NODE={said!r} cannot be read: expected as in 2(x3),1")
    tasks = max(int(match[1]) for match in found if match is not None)
    if tasks != 1:
        raise PolicyError(
            f"$SLURM_STEP_TASKS_PER_NODE={said}: `elastic run` is started once on every node, and starts the node's "
            f"ranks itself. Write: srun --nodes={nodes} --ntasks={nodes} elastic run --nproc {tasks} ..."
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


_COMMAND_TIMEOUT_S = 60.0


def remaining_nodes(job: str) -> tuple[str, ...]:
    """Return the machines of a running job, without those that Slurm has lost; () if unknown."""
    code, output = _run_command("squeue", "--noheader", "--jobs", job, "--states", "RUNNING", "--format", "%N")
    try:
        return parse_host_list(output) if output and not code else ()
    except PolicyError:
        return ()


def requeue_job(job: str) -> str:
    """Requeue a job and return a sentence with the result. Slurm ends all remaining processes of the job."""
    code, output = _run_command("scontrol", "requeue", job)
    if not code:
        return f"Slurm's job {job} is back in the queue"
    return f"Slurm's job {job} is not back in the queue: {output}; where it may be, write: scontrol requeue {job}"


def _run_command(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout if not done.returncode else done.stderr).strip()
