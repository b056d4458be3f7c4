"""The environment variables that keep NCCL's watchdog from ending a process that recovers by itself. Pure.

By default torch's watchdog ends the process when a peer is lost, or aborts the communicator before anybody has asked
which device work was complete. Who runs the job hears of a lost rank sooner, and aborts all groups of all ranks. Torch
reads these variables when it makes a group; so they are set before the first one. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

NONBLOCKING_VARIABLE = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_LONGEST_DUMP_MS = 500
"""A survivor is to be in the next world 2 s after a fault, and torch multiplies this by four."""


class NcclRuleState(str, enum.Enum):
    SET = "set"
    """As it has to be."""
    UNSET = "unset"
    """``elastic.run`` sets it."""
    CONTRADICTED = "contradicted"
    """``elastic.run`` refuses."""


class NcclRule(NamedTuple):
    names: tuple[str, ...]
    """The last ones are older, and torch reads them as well."""
    fits: Callable[[str], bool]
    sets: str | None
    """The value where it is unset; ``None``: it stays unset."""
    why: str
    """What would happen otherwise."""


class NcclFinding(NamedTuple):
    """What the environment says to one rule."""

    name: str
    value: str
    """What it is; where it is unset, what it will be."""
    state: NcclRuleState
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def is_switched_on(value: str) -> bool:
    """As torch reads its switches: what it refuses is not on either."""
    return value.strip().lower() in ("y", "yes", "1", "t", "true")


def _is_off(value: str) -> bool:
    return not is_switched_on(value)


NCCL_RULES = (
    NcclRule(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        lambda value: value.strip() == "0",
        "0",
        "NCCL's watchdog would end this process, or abort its groups, before the survivors of a fault know what they "
        "hold",
    ),
    NcclRule(
        ("TORCH_NCCL_ENABLE_MONITORING",),
        _is_off,
        "0",
        "once the watchdog of one rank had seen an error, NCCL's monitor would end the processes of all",
    ),
    NcclRule(
        ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"),
        _is_off,
        None,
        "torch turns the error handling of NCCL's watchdog on again with it",
    ),
    NcclRule(
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda value: value.strip().upper() != "DETAIL",
        None,
        "torch turns the error handling of NCCL's watchdog on again with it; INFO does not",
    ),
    NcclRule(
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
        lambda value: value.strip().isdecimal() and int(value) <= _LONGEST_DUMP_MS,
        "0",
        "after an error NCCL's watchdog sleeps four times as long and holds the lock that collectives start under; "
        f"{_LONGEST_DUMP_MS} ms is the most that recovery allows",
    ),
)


def check_nccl_environment(environ: Mapping[str, str]) -> list[NcclFinding]:
    """What ``environ`` says to each of the rules, in their order."""
    return [found for rule in NCCL_RULES if (found := _examined(rule, environ)) is not None]


def _examined(rule: NcclRule, environ: Mapping[str, str]) -> NcclFinding | None:
    there = [(name, environ[name]) for name in rule.names if name in environ]
    for name, value in there:
        if not rule.fits(value):
            return NcclFinding(name, value, NcclRuleState.CONTRADICTED, rule.why)
    if there:
        return NcclFinding(*there[0], NcclRuleState.SET, rule.why)
    return None if rule.sets is None else NcclFinding(rule.names[0], rule.sets, NcclRuleState.UNSET, rule.why)
