"""What the elastic agent tells a worker by its environment, read once and checked."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.control.plane import Assignment
from elastic.errors import PolicyError

log = logging.getLogger(__name__)

COORDINATION = "HYPERPOD_SIGNAL_COORDINATION"
PATIENCE = "ELASTIC_HYPERPOD_PATIENCE_S"
PROGRESS = "ELASTIC_HYPERPOD_PROGRESS"
RESTARTS = "JOB_RESTART_COUNT"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", RESTARTS)
"""Not GROUP_WORLD_SIZE: the agent counts ranks there, where torchrun counts nodes."""
_PATIENCE_S = 120.0


class Coordination(enum.Enum):
    """What is to become of a graceful stop: HyperPod's own words."""

    DISABLED = "disabled"
    DISTRIBUTED = "distributed"


class Follow(enum.Enum):
    """From which step a job goes on, where the operator and the tiers differ."""

    NEWEST = "newest"
    """The newest whole one."""
    TOLD = "told"
    """The operator's, or none."""


@dataclass(frozen=True)
class Worker:
    """One rank, as the agent started it."""

    place: Assignment
    master: tuple[str, int]
    """Host and port at which the first rank keeps the store of this world."""


def worker_from(environ: Mapping[str, str] = os.environ) -> Worker:
    """This process's place, or :class:`PolicyError` that names every variable that is missing or cannot be right."""
    problems: list[str] = []
    numbers = {name: _number(environ, name, problems) for name in (*_NUMBERS, "MASTER_PORT")}
    host = environ.get("MASTER_ADDR", "")
    if not host:
        problems.append("MASTER_ADDR is not set")
    if not problems:
        problems += _contradictions(numbers)
    if problems:
        raise PolicyError(f"the environment is not a HyperPod worker's: {'; '.join(problems)}")
    port, restarts = numbers["MASTER_PORT"], numbers[RESTARTS]
    place = Assignment(
        epoch=0,
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        node_rank=numbers["GROUP_RANK"],
        node_count=numbers["WORLD_SIZE"] // numbers["LOCAL_WORLD_SIZE"],
        store=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        restarts=restarts,
        reason=f"started by HyperPod's agent after {restarts} fault{'' if restarts == 1 else 's'}",
    )
    return Worker(place, (host, port))


def coordination(environ: Mapping[str, str] = os.environ) -> Coordination:
    """``disabled`` unless the job says otherwise, as the agent has it."""
    said = environ.get(COORDINATION, "").strip().lower() or Coordination.DISABLED.value
    try:
        return Coordination(said)
    except ValueError:
        known = " or ".join(one.value for one in Coordination)
        log.warning("%s=%s is not known, it is %s: taken as disabled", COORDINATION, said, known)
        return Coordination.DISABLED


def patience_s(environ: Mapping[str, str] = os.environ) -> float:
    """How long a rank that has stopped waits for its own agent to be asked, too."""
    said = environ.get(PATIENCE, "")
    try:
        found = float(said) if said else _PATIENCE_S
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise PolicyError(f"{PATIENCE}={said!r} is no number of seconds")
    return found


def follow(environ: Mapping[str, str] = os.environ) -> Follow:
    said = environ.get(PROGRESS, "") or Follow.NEWEST.value
    try:
        return Follow(said)
    except ValueError:
        known = " or ".join(one.value for one in Follow)
        raise PolicyError(f"{PROGRESS}={said!r} is not known: {known}") from None


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int:
    said = environ.get(name)
    if said is None and name == RESTARTS:
        said = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if said is None:
        problems.append(f"{name} is not set")
    elif not (said.isascii() and said.isdigit() and len(said) < 10):
        problems.append(f"{name}={said[:40]!r} is no count")
    else:
        return int(said)
    return -1


def _contradictions(told: Mapping[str, int]) -> list[str]:
    pairs = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    found = [f"{one}={told[one]} of {all_of}={told[all_of]}" for one, all_of in pairs if told[one] >= told[all_of]]
    size = told["LOCAL_WORLD_SIZE"]
    if size and told["WORLD_SIZE"] % size:
        found.append(f"WORLD_SIZE={told['WORLD_SIZE']} in nodes of {size} ranks each")
    if told["RANK"] != told["GROUP_RANK"] * size + told["LOCAL_RANK"]:
        found.append(f"RANK={told['RANK']} as number {told['LOCAL_RANK']} of node {told['GROUP_RANK']}")
    if not 0 < told["MASTER_PORT"] < 1 << 16:
        found.append(f"MASTER_PORT={told['MASTER_PORT']} is no port")
    return found
