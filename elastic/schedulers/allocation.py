"""The nodes that a scheduler allocated, and a job's settings from options and the allocation. Pure.

Options have priority. The result is settings or a :class:`PolicyError`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.errors import PolicyError
from peerstore.network_addresses import is_loopback_host, is_wildcard_host, join_address, split_address

_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?", re.ASCII)


def node_range(text: str) -> tuple[int, int]:
    """Return the smallest and largest number of ``--nnodes``, which is ``2`` or ``1:4``."""
    found = _NODES.fullmatch(text)
    if found is None:
        raise PolicyError(f"--nnodes {text!r}: write a number of nodes, or MIN:MAX")
    least = int(found[1])
    most = int(found[2] or found[1])
    if not 1 <= least <= most:
        raise PolicyError(f"--nnodes {text!r}: MIN is at least 1 and at most MAX")
    return least, most


@dataclass(frozen=True)
class SchedulerAllocation:
    """The scheduler's description of this process's job."""

    said: str
    """The variables with the allocation, for messages."""
    least: int
    """Smallest number of nodes."""
    most: int
    """Largest number of nodes."""
    nproc: int | None = None
    """Ranks per node; ``None`` if not set."""
    node: str = ""
    """Name of this machine; "" for its host name."""
    nodes: tuple[str, ...] = ()
    """Names of all machines, in the same order on each of them; empty if unknown."""
    host: str = ""
    """Host of the coordinator; "" if not set."""
    port: int = 0
    """Port of the coordinator."""
    leads: bool = False
    """Whether the coordinator runs on this machine."""
    run: str = ""
    """Identifier that distinguishes this job from others with the same script."""
    agreement: str = ""
    """Name that is unique to this start of the job and equal on all its machines."""
    notices: bool = False
    """Whether the scheduler signals all machines at once, so that a signal concerns the whole job."""
    in_step: bool = True
    """Whether the scheduler started this process on every machine, not in a shell on one of them."""
    counts_nodes: bool = True
    """Whether the variables state the number of nodes."""


@dataclass(frozen=True)
class RunOptions:
    """Options of ``elastic run``; ``None`` or "" if not set."""

    nnodes: str | None = None
    nproc: int | None = None
    node: str = ""
    coordinator: str = ""
    coordinator_here: bool = False
    simulated: int | None = None


@dataclass(frozen=True)
class NodeLaunch:
    """Settings of one ``elastic run`` of a job."""

    nnodes: str
    nproc: int
    node: str = ""
    coordinator: str = ""
    """``host:port`` or URL of the coordinator; "" for a job on this machine alone."""
    leads: bool = True
    """Whether this process starts the coordinator."""
    found: SchedulerAllocation | None = None
    """The scheduler's allocation; ``None`` without a scheduler."""

    def refuse_more(self, least: int) -> None:
        """Raise :class:`PolicyError` if the policy needs ``least`` nodes and the scheduler allocated fewer."""
        if self.found is not None and self.found.in_step and self.several and least > self.found.most:
            raise PolicyError(
                f"--policy and {self.found.said}: the job would wait for at least {least} nodes, and has only "
                f"{self.found.most}"
            )

    @property
    def several(self) -> bool:
        """Whether the job may have several machines."""
        return bool(self.coordinator)

    @property
    def is_given_its_coordinator(self) -> bool:
        """Whether the coordinator runs on the host that the scheduler chose."""
        return self.several and self.found is not None and bool(self._host) and self._host == self.found.host

    @property
    def other_leader(self) -> str:
        """Scheduler's name of the other machine that runs the coordinator; "" if unknown or this one."""
        if self.found is None or self.leads or not self.several:
            return ""
        host = self._host
        return next((name for name in self.found.nodes if host and _is_same_host(name, host)), "")

    @property
    def notices(self) -> bool:
        return self.found is not None and self.found.notices

    @property
    def run(self) -> str:
        return "" if self.found is None else self.found.run

    @property
    def agreement(self) -> str:
        """Name for the shared secret of these machines; "" if the coordinator runs on none of them."""
        if self.found is None or not self.several:
            return ""
        host = self._host
        is_machine = self.leads or _is_address(host) or any(_is_same_host(name, host) for name in self.found.nodes)
        return self.found.agreement if is_machine else ""

    @property
    def _host(self) -> str:
        """Host of the coordinator; "" for a URL, where any host may lead."""
        return "" if _is_url(self.coordinator) else split_address(self.coordinator)[0]

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the other machines; empty if unknown."""
        return () if self.found is None else tuple(name for name in self.found.nodes if name != self.found.node)


def merge_allocations(
    slurm: SchedulerAllocation | None, torchelastic: SchedulerAllocation | None
) -> SchedulerAllocation | None:
    """Return the allocation from both sets of variables; raise :class:`PolicyError` if they contradict.

    Slurm's has priority if Slurm started this process on every machine. ``torchelastic`` adds missing values.
    """
    if slurm is None or torchelastic is None:
        return slurm or torchelastic
    if not slurm.in_step:
        return torchelastic if torchelastic.most > 1 else replace(slurm, nproc=torchelastic.nproc)
    if torchelastic.counts_nodes and torchelastic.most != slurm.most:
        raise PolicyError(f"{torchelastic.said} and {slurm.said}, which has {slurm.most}: unset one of them")
    if None not in (slurm.nproc, torchelastic.nproc) and slurm.nproc != torchelastic.nproc:
        raise PolicyError(
            f"$PET_NPROC_PER_NODE is {torchelastic.nproc}, and $SLURM_GPUS_ON_NODE {slurm.nproc}: write --nproc"
        )
    return replace(slurm, nproc=slurm.nproc or torchelastic.nproc)


def resolve_launch(
    wanted: RunOptions, found: SchedulerAllocation | None, *, is_mine: Callable[[str], bool] = lambda _address: False
) -> NodeLaunch:
    """Return the settings from options, and from the scheduler where an option is not set.

    ``is_mine`` tests whether an IP address belongs to this machine.
    """
    if found is None:
        if wanted.coordinator_here and not wanted.coordinator:
            raise PolicyError("--coordinator-here needs --coordinator HOST:PORT, where the other machines find it")
        return _launch_from_options(wanted, None)
    if not found.in_step:
        return _launch_in_shell(wanted, found)
    least = _node_count(wanted, found)
    if found.most == 1:
        return _launch_from_options(wanted, found)
    if wanted.simulated:
        raise PolicyError(
            f"--simulate-nodes and {found.said}: every one of {found.most} machines would simulate a job of its own. "
            "Leave the option out, or start `elastic run` on one machine alone"
        )
    coordinator, leads = _resolve_coordinator(wanted, found, is_mine)
    return NodeLaunch(
        nnodes=wanted.nnodes or least,
        nproc=wanted.nproc or found.nproc or 1,
        node=wanted.node or found.node,
        coordinator=coordinator,
        leads=leads,
        found=found,
    )


def _launch_from_options(wanted: RunOptions, found: SchedulerAllocation | None) -> NodeLaunch:
    """Return the settings of a single machine, or of several as the options require."""
    return NodeLaunch(
        nnodes=wanted.nnodes or "1",
        nproc=wanted.nproc or (found.nproc if found is not None else None) or 1,
        node=wanted.node or (found.node if found is not None and not wanted.simulated else ""),
        coordinator=wanted.coordinator,
        leads=not wanted.coordinator or wanted.coordinator_here,
        found=found,
    )


def _launch_in_shell(wanted: RunOptions, found: SchedulerAllocation) -> NodeLaunch:
    """Return the settings of a process in a shell of an allocation, without a step on its machines."""
    alone = wanted.simulated or wanted.coordinator or (wanted.nnodes and node_range(wanted.nnodes)[1] == 1)
    if found.most > 1 and not alone:
        raise PolicyError(
            f"{found.said} has {found.most} machines, and this process is not a step on all of them: it would run "
            "alone and wait for the others. Start it on all: srun --ntasks-per-node=1 elastic run ...; for this "
            "machine alone, write --nnodes 1"
        )
    return _launch_from_options(wanted, found)


def _node_count(wanted: RunOptions, found: SchedulerAllocation) -> str:
    """Return the scheduler's number of nodes in the form of ``--nnodes``; raise if the option needs more."""
    if wanted.nnodes is not None and not wanted.simulated and (found.most > 1 or not wanted.coordinator):
        least = node_range(wanted.nnodes)[0]
        if least > found.most:
            raise PolicyError(
                f"--nnodes {wanted.nnodes} and {found.said}: the job would wait for at least {least} nodes, and has "
                f"only {found.most}"
            )
    return str(found.most) if found.least == found.most else f"{found.least}:{found.most}"


def _resolve_coordinator(
    wanted: RunOptions, found: SchedulerAllocation, is_mine: Callable[[str], bool]
) -> tuple[str, bool]:
    """Return the coordinator's address and whether this machine runs it."""
    if _is_url(wanted.coordinator):  # the URL of the leader record; any machine may lead
        return wanted.coordinator, False
    host, port = split_address(wanted.coordinator) if wanted.coordinator else ("", found.port)
    if is_wildcard_host(host):
        host = found.host
    if not host:
        raise PolicyError(f"{found.said}, and nothing says where the coordinator is: write --coordinator HOST:PORT")
    leader = next((name for name in found.nodes if _is_same_host(name, host)), "")
    if leader:
        leads = leader == found.node
    elif _is_same_host(host, found.host) or is_loopback_host(host):
        leads = found.leads
    else:  # the address of one of the machines, or of another host
        leads = wanted.coordinator_here or (_is_address(host) and is_mine(host))
    if wanted.coordinator_here and not leads:
        raise PolicyError(
            f"--coordinator-here and {found.said}: the coordinator is on {leader or host}, and this is "
            f"{found.node or 'another machine'}. Leave --coordinator-here out: the address decides which machine leads"
        )
    return join_address(host, port), leads


def _is_url(coordinator: str) -> bool:
    return "://" in coordinator


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_same_host(name: str, other: str) -> bool:
    """Return whether both names mean the same machine, with or without a domain."""
    if name == other:
        return True
    short = name.partition(".")[0]
    return short == other.partition(".")[0] and short in (name, other) and not short.isdigit()
