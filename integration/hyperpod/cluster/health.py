"""Which faults are a machine's own, and from how many of them on it gets which health label. Pure.

HyperPod reboots and replaces nodes by the label; nobody puts a pod on a node that has one of the last three.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tieredckpt.ledger.events import Ended, Event, Fault

LABEL = "sagemaker.amazonaws.com/node-health-status"


class NodeHealth(enum.Enum):
    """The label's values, from well to worst."""

    SCHEDULABLE = "Schedulable"
    UNSCHEDULABLE = "Unschedulable"
    PENDING_REBOOT = "UnschedulablePendingReboot"
    PENDING_REPLACEMENT = "UnschedulablePendingReplacement"

    @property
    def gravity(self) -> int:
        return list(NodeHealth).index(self)


class FaultKind(enum.Enum):
    LOST = "lost"
    """The driver does not find the device any more."""
    MEMORY = "memory"
    """Its memory has errors that cannot be corrected."""
    STUCK = "stuck"
    """It does not do what it is given."""
    LINK = "link"
    """Devices, or machines, do not reach each other by the fast way."""


_SIGNS = (
    (FaultKind.LOST, r"fallen off the bus|GPU is lost|no CUDA-capable device|\bXid\b.{0,80}?\b79\b"),
    (FaultKind.MEMORY, r"uncorrectable ECC|row[- ]remap|\bXid\b.{0,80}?\b(48|63|64|94|95)\b"),
    (FaultKind.LINK, r"NVLink.{0,40}(error|fail)|\bXid\b.{0,80}?\b74\b|NET/OFI.{0,80}(error|fail)"),
    (FaultKind.STUCK, r"the device (has not answered|is broken)|launch timed out|\bXid\b.{0,80}?\b(119|120)\b"),
)
"""Words of CUDA, of NVIDIA's driver and NCCL, and of this project's own health check, the most telling first. What a
program does wrong itself (an illegal access, an assertion, no memory left) is no fault of its machine."""

_SAME_S = 120.0


@dataclass(frozen=True)
class DeviceFault:
    at: float
    """Seconds since 1970."""
    node: str
    kind: FaultKind
    words: str = ""


@dataclass(frozen=True)
class HealthRule:
    """So many faults of a kind within the window, and a node is to be started again, or replaced."""

    window_s: float = 86400.0
    reboot: Mapping[FaultKind, int] = field(
        default_factory=lambda: {FaultKind.LOST: 1, FaultKind.MEMORY: 1, FaultKind.STUCK: 2, FaultKind.LINK: 2}
    )
    replace: Mapping[FaultKind, int] = field(
        default_factory=lambda: {FaultKind.LOST: 2, FaultKind.MEMORY: 2, FaultKind.STUCK: 4, FaultKind.LINK: 4}
    )


def kind_of(words: str) -> FaultKind | None:
    """What a fault's words say of the machine; None: nothing."""
    return next((kind for kind, signs in _SIGNS if re.search(signs, words, re.IGNORECASE | re.DOTALL)), None)


def device_faults(events: Iterable[Event]) -> list[DeviceFault]:
    """Of a job's ledger, by time. Several ranks tell of one fault of their machine, and one that is not mended is met
    again by the next process: what comes within two minutes of the last one that counts is the same.
    """
    found: list[DeviceFault] = []
    counted: dict[tuple[str, FaultKind], float] = {}
    for event in sorted(filter(None, map(_fault_in, events)), key=lambda fault: fault.at):
        if event.at - counted.get((event.node, event.kind), -math.inf) > _SAME_S:
            counted[event.node, event.kind] = event.at
            found.append(event)
    return found


def _fault_in(event: Event) -> DeviceFault | None:
    """What the coordinator was told, and a rank's own last words: it says more of itself than its supervisor knows."""
    if isinstance(event, Fault):
        words = event.reason
    elif isinstance(event, Ended) and event.who == "rank":
        words = event.words
    else:
        return None
    kind = kind_of(words)
    return DeviceFault(event.at, event.node, kind, words) if kind is not None and event.node else None


def verdict(faults: Iterable[DeviceFault], now: float, rule: HealthRule | None = None) -> NodeHealth:
    """What the faults of one node ask for."""
    rule = rule or HealthRule()
    counted = Counter(fault.kind for fault in faults if now - rule.window_s <= fault.at <= now)
    for limits, health in ((rule.replace, NodeHealth.PENDING_REPLACEMENT), (rule.reboot, NodeHealth.PENDING_REBOOT)):
        if any(number >= limits[kind] for kind, number in counted.items() if kind in limits):
            return health
    return NodeHealth.SCHEDULABLE


def worse(known: str | None, wanted: NodeHealth) -> bool:
    """Whether the label is to be set: only ever to what is worse. Words nobody knows are somebody else's, and stay."""
    if known is None:
        return wanted is not NodeHealth.SCHEDULABLE
    try:
        return wanted.gravity > NodeHealth(known).gravity
    except ValueError:
        return False
