"""Environment variables that stop NCCL's watchdog from ending a process that can recover. Pure.

By default torch's watchdog ends the process when a peer is lost. Or it aborts the communicator before the recovery
loop has checked which device work completed. The coordinator detects a lost rank sooner, and all ranks abort all
groups. Torch reads these variables when it creates a process group, so they must be set before the first one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

NONBLOCKING_VARIABLE = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_MAX_DUMP_MS = 500
"""Survivors must join the next world 2 s after a fault, and torch multiplies this value by four."""


class NcclRuleState(str, enum.Enum):
    SET = "set"
    """The variable has an allowed value."""
    UNSET = "unset"
    """The variable is unset; ``elastic.run`` sets it."""
    CONTRADICTED = "contradicted"
    """The variable has a wrong value; ``elastic.run`` refuses to start."""


class NcclRule(NamedTuple):
    names: tuple[str, ...]
    """Names of the variable; after the first come older names that torch also reads."""
    fits: Callable[[str], bool]
    sets: str | None
    """Value to set if the variable is unset. ``None``: it stays unset."""
    why: str
    """Consequence of a wrong value."""


class NcclFinding(NamedTuple):
    """Result of one rule for an environment."""

    name: str
    value: str
    """Value of the variable; if it is unset, the value that will be set."""
    state: NcclRuleState
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def is_switched_on(value: str) -> bool:
    """Return whether torch reads ``value`` as true. Values that torch rejects count as false."""
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
        lambda value: value.strip().isdecimal() and int(value) <= _MAX_DUMP_MS,
        "0",
        "after an error NCCL's watchdog sleeps four times as long and holds the lock that collectives start under; "
        f"{_MAX_DUMP_MS} ms is the most that recovery allows",
    ),
)


def check_nccl_environment(environ: Mapping[str, str]) -> list[NcclFinding]:
    """Return the findings for ``environ``, in the order of the rules.

    Rules without a variable or value have none.
    """
    return [found for rule in NCCL_RULES if (found := _check_rule(rule, environ)) is not None]


def _check_rule(rule: NcclRule, environ: Mapping[str, str]) -> NcclFinding | None:
    present = [(name, environ[name]) for name in rule.names if name in environ]
    for name, value in present:
        if not rule.fits(value):
            return NcclFinding(name, value, NcclRuleState.CONTRADICTED, rule.why)
    if present:
        return NcclFinding(*present[0], NcclRuleState.SET, rule.why)
    return None if rule.sets is None else NcclFinding(rule.names[0], rule.sets, NcclRuleState.UNSET, rule.why)
