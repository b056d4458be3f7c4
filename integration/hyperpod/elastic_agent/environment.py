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
"""Step to resume from under HyperPod: ``newest`` (default), or ``operator`` for the operator's."""
RESTART_COUNT_ENV = "JOB_RESTART_COUNT"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", RESTART_COUNT_ENV)
"""Numeric variables.

GROUP_WORLD_SIZE is missing because the agent counts ranks in it, while torchrun counts nodes.
"""
_DEFAULT_PATIENCE_S = 120.0


class SignalCoordination(enum.Enum):
    """HyperPod's setting for graceful stops."""

    DISABLED = "disabled"
    DISTRIBUTED = "distributed"


class ResumeFrom(enum.Enum):
    """Step to resume from if the operator and the tiers differ."""

    NEWEST = "newest"
    """The newest complete step."""
    OPERATOR = "operator"
    """The operator's step, or none."""


@dataclass(frozen=True)
class LaunchedWorker:
    """One rank started by the agent."""

    assignment: RankAssignment
    master_address: tuple[str, int]
    """Host and port of the store of this world, which rank 0 serves."""


def launched_worker(environ: Mapping[str, str] = os.environ) -> LaunchedWorker:
    """Return the assignment of this process.

    Raise :class:`PolicyError` with all variables that are missing or invalid.
    """
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
    assignment = RankAssignment(
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
    return LaunchedWorker(assignment, (host, port))


def signal_coordination(environ: Mapping[str, str] = os.environ) -> SignalCoordination:
    """Return the setting; ``disabled`` if it is unset or unknown, as in the agent."""
    value = environ.get(COORDINATION_ENV, "").strip().lower() or SignalCoordination.DISABLED.value
    try:
        return SignalCoordination(value)
    except ValueError:
        known = " or ".join(setting.value for setting in SignalCoordination)
        log.warning("%s=%s is not known, it is %s: taken as disabled", COORDINATION_ENV, value, known)
        return SignalCoordination.DISABLED


def stop_patience_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds that a stopped rank waits until its own agent stops it, too."""
    value = environ.get(STOP_PATIENCE_ENV, "")
    try:
        patience_s = float(value) if value else _DEFAULT_PATIENCE_S
    except ValueError:
        patience_s = -1.0
    if not 0 <= patience_s < float("inf"):
        raise PolicyError(f"{STOP_PATIENCE_ENV}={value!r} is not a number of seconds")
    return patience_s


def resume_from(environ: Mapping[str, str] = os.environ) -> ResumeFrom:
    value = environ.get(RESUME_FROM_ENV, "") or ResumeFrom.NEWEST.value
    try:
        return ResumeFrom(value)
    except ValueError:
        known = " or ".join(setting.value for setting in ResumeFrom)
        raise PolicyError(f"{RESUME_FROM_ENV}={value!r} is not known: {known}") from None


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int:
    value = environ.get(name)
    if value is None and name == RESTART_COUNT_ENV:
        value = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if value is None:
        problems.append(f"{name} is not set")
    elif not (value.isascii() and value.isdigit() and len(value) < 10):
        problems.append(f"{name}={value[:40]!r} is no count")
    else:
        return int(value)
    return -1


def _contradictions(numbers: Mapping[str, int]) -> list[str]:
    pairs = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    problems = [
        f"{name}={numbers[name]} of {total}={numbers[total]}"
        for name, total in pairs
        if numbers[name] >= numbers[total]
    ]
    size = numbers["LOCAL_WORLD_SIZE"]
    if size and numbers["WORLD_SIZE"] % size:
        problems.append(f"WORLD_SIZE={numbers['WORLD_SIZE']} in nodes of {size} ranks each")
    if numbers["RANK"] != numbers["GROUP_RANK"] * size + numbers["LOCAL_RANK"]:
        problems.append(f"RANK={numbers['RANK']} as number {numbers['LOCAL_RANK']} of node {numbers['GROUP_RANK']}")
    if not 0 < numbers["MASTER_PORT"] < 1 << 16:
        problems.append(f"MASTER_PORT={numbers['MASTER_PORT']} is no port")
    return problems


AGENT_SOCKET_ENV = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
AGENT_MODE_ENV = "ELASTIC_HYPERPOD_MODE"
"""Restart mode of the HyperPod agent, ``in-process`` or ``process``.

Default: read from the agent's command line.
"""

_PID = re.compile(r"_(\d+)\.sock$")
_PROC = Path("/proc")


class AgentMode(enum.Enum):
    IN_PROCESS = "in-process"
    """The process continues after a fault, and receives its next rank over the agent's socket."""
    PROCESS = "process"
    """The agent restarts the process, with its next rank in the environment."""
    NONE = "none"
    """No agent started the process."""


def agent_mode(environ: Mapping[str, str] = os.environ, proc: Path = _PROC) -> AgentMode:
    """Return the restart mode of the agent that started this process.

    An in-process agent sets no rank, or -1, before the first start. After it restarts a process, the environment
    contains the earlier rank, as in process mode; then the agent's command line decides.
    """
    path = environ.get(AGENT_SOCKET_ENV, "")
    if not path:
        return AgentMode.NONE
    mode_text = environ.get(AGENT_MODE_ENV, "")
    if mode_text:
        try:
            return AgentMode(mode_text)
        except ValueError:
            raise PolicyError(
                f"${AGENT_MODE_ENV}={mode_text!r}: one of {', '.join(mode.value for mode in AgentMode)}"
            ) from None
    if environ.get("RANK", "-1").startswith("-") or not environ.get("MASTER_ADDR"):
        return AgentMode.IN_PROCESS
    return AgentMode.IN_PROCESS if _restarts_in_process(path, proc) else AgentMode.PROCESS


def _restarts_in_process(path: str, proc: Path) -> bool:
    """Return whether the agent's command line selects in-process restarts.

    The name of the socket contains the agent's pid; otherwise the agent is this process's parent.
    """
    match = _PID.search(path)
    pid = match.group(1) if match else str(os.getppid())
    try:
        words = (proc / pid / "cmdline").read_bytes().split(b"\0")
    except OSError as error:
        raise PolicyError(f"how the agent restarts cannot be read ({error}): set ${AGENT_MODE_ENV}") from error
    return any(re.match(rb"--inprocess[-_]r", word) for word in words)
