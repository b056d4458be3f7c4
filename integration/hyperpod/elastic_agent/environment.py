"""The elastic agent's environment variables, read once and validated: restart mode, rank, timeouts."""

from __future__ import annotations

import enum
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.control.control_plane import RankAssignment
from elastic.errors import PolicyError

log = logging.getLogger(__name__)

COORDINATION_ENV = "HYPERPOD_SIGNAL_COORDINATION"
STOP_PATIENCE_ENV = "ELASTIC_HYPERPOD_STOP_TIMEOUT_S"
"""Seconds that a stopped rank waits until its HyperPod agent stops it, too. Default: 120."""
RESUME_FROM_ENV = "ELASTIC_HYPERPOD_RESUME_FROM"
"""Step to resume from under HyperPod: ``newest`` (the default), or ``operator`` for the operator's step."""
RESTART_COUNT_ENV = "JOB_RESTART_COUNT"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", RESTART_COUNT_ENV)
"""Not GROUP_WORLD_SIZE: the agent counts ranks there, where torchrun counts nodes."""
_PATIENCE_S = 120.0


class SignalCoordination(enum.Enum):
    """What is to become of a graceful stop: HyperPod's own words."""

    DISABLED = "disabled"
    DISTRIBUTED = "distributed"


class ResumeFrom(enum.Enum):
    """From which step a job goes on, where the operator and the tiers differ."""

    NEWEST = "newest"
    """The newest whole one."""
    OPERATOR = "operator"
    """The operator's, or none."""


@dataclass(frozen=True)
class LaunchedWorker:
    """One rank, as the agent started it."""

    assignment: RankAssignment
    master_address: tuple[str, int]
    """Host and port at which the first rank keeps the store of this world."""


def launched_worker(environ: Mapping[str, str] = os.environ) -> LaunchedWorker:
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
    port, restarts = numbers["MASTER_PORT"], numbers[RESTART_COUNT_ENV]
    place = RankAssignment(
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
    return LaunchedWorker(place, (host, port))


def signal_coordination(environ: Mapping[str, str] = os.environ) -> SignalCoordination:
    """``disabled`` unless the job says otherwise, as the agent has it."""
    said = environ.get(COORDINATION_ENV, "").strip().lower() or SignalCoordination.DISABLED.value
    try:
        return SignalCoordination(said)
    except ValueError:
        known = " or ".join(one.value for one in SignalCoordination)
        log.warning("%s=%s is not known, it is %s: taken as disabled", COORDINATION_ENV, said, known)
        return SignalCoordination.DISABLED


def stop_patience_s(environ: Mapping[str, str] = os.environ) -> float:
    """How long a rank that has stopped waits for its own agent to be asked, too."""
    said = environ.get(STOP_PATIENCE_ENV, "")
    try:
        found = float(said) if said else _PATIENCE_S
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise PolicyError(f"{STOP_PATIENCE_ENV}={said!r} is no number of seconds")
    return found


def resume_from(environ: Mapping[str, str] = os.environ) -> ResumeFrom:
    said = environ.get(RESUME_FROM_ENV, "") or ResumeFrom.NEWEST.value
    try:
        return ResumeFrom(said)
    except ValueError:
        known = " or ".join(one.value for one in ResumeFrom)
        raise PolicyError(f"{RESUME_FROM_ENV}={said!r} is not known: {known}") from None


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int:
    said = environ.get(name)
    if said is None and name == RESTART_COUNT_ENV:
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


AGENT_SOCKET_ENV = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
AGENT_MODE_ENV = "ELASTIC_HYPERPOD_MODE"
"""Restart mode of the HyperPod agent, ``in-process`` or ``process``. Default: read from the agent's command line."""

_PID = re.compile(r"_(\d+)\.sock$")
_PROC = Path("/proc")


class AgentMode(enum.Enum):
    IN_PROCESS = "in-process"
    """It lives on, and is told its next place over the agent's socket."""
    PROCESS = "process"
    """It is ended and started again, with its place in the environment."""
    NONE = "none"
    """No agent started it."""


def agent_mode(environ: Mapping[str, str] = os.environ, proc: Path = _PROC) -> AgentMode:
    """Read from the environment as far as it says so.

    Before the first start there is no rank, and -1 in its place, only where ranks are told over the socket. A process
    that such an agent had to start again finds the place of the one before it, like one in the other mode: then what
    the agent was started with tells.
    """
    path = environ.get(AGENT_SOCKET_ENV, "")
    if not path:
        return AgentMode.NONE
    said = environ.get(AGENT_MODE_ENV, "")
    if said:
        try:
            return AgentMode(said)
        except ValueError:
            raise PolicyError(
                f"${AGENT_MODE_ENV}={said!r}: one of {', '.join(mode.value for mode in AgentMode)}"
            ) from None
    if environ.get("RANK", "-1").startswith("-") or not environ.get("MASTER_ADDR"):
        return AgentMode.IN_PROCESS
    return AgentMode.IN_PROCESS if _restarts_in_process(path, proc) else AgentMode.PROCESS


def _restarts_in_process(path: str, proc: Path) -> bool:
    """The socket is named for the agent's process; where it is not, the agent is this process's parent."""
    named = _PID.search(path)
    pid = named.group(1) if named else str(os.getppid())
    try:
        words = (proc / pid / "cmdline").read_bytes().split(b"\0")
    except OSError as error:
        raise PolicyError(f"how the agent restarts cannot be read ({error}): set ${AGENT_MODE_ENV}") from error
    return any(re.match(rb"--inprocess[-_]r", word) for word in words)
