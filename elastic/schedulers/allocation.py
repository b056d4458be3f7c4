"""The nodes that a scheduler allocated, and a job's settings from options first and from the scheduler second. Pure.

Pure: an environment and options go in, settings or a :class:`PolicyError` come out.
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
    """``2`` or ``1:4``."""
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
    """What a scheduler says of the job that this process belongs to."""

    said: str
    """The variables that say so, for messages."""
    least: int
    most: int
    """Nodes."""
    nproc: int | None = None
    """Ranks of every node; ``None`` where it is not said."""
    node: str = ""
    """This machine's name; "" for the host's own."""
    nodes: tuple[str, ...] = ()
    """All names, where the scheduler gives them; the same order on every machine."""
    host: str = ""
    port: int = 0
    """Where the coordinator is to be."""
    leads: bool = False
    """It is to be here."""
    run: str = ""
    """What tells this job from others that run the same script."""
    agreement: str = ""
    """A name that only this start of the job has, on all its machines."""
    notices: bool = False
    """A signal comes to all machines at once, and means the job."""
    in_step: bool = True
    """Started on every machine, and not in a shell on one of them."""
    counts_nodes: bool = True


@dataclass(frozen=True)
class RunOptions:
    """Options of ``elastic run``; ``None`` and "" where they are not given."""

    nnodes: str | None = None
    nproc: int | None = None
    node: str = ""
    coordinator: str = ""
    coordinator_here: bool = False
    simulated: int | None = None


@dataclass(frozen=True)
class NodeLaunch:
    """What one ``elastic run`` is in its job."""

    nnodes: str
    nproc: int
    node: str = ""
    coordinator: str = ""
    """``host:port``, or "" for a job on this machine alone."""
    leads: bool = True
    """The coordinator is to be started here."""
    found: SchedulerAllocation | None = None
    """What the scheduler said, where one did."""

    def refuse_more(self, least: int) -> None:
        """A job of ``least`` nodes or more, as its policy says by now, where the scheduler has given fewer."""
        if self.found is not None and self.found.in_step and self.several and least > self.found.most:
            raise PolicyError(
                f"--policy and {self.found.said}: {least} nodes at least would be waited for, and there are "
                f"{self.found.most}"
            )

    @property
    def several(self) -> bool:
        return bool(self.coordinator)

    @property
    def is_given_its_coordinator(self) -> bool:
        """Nobody has named another machine for it than the scheduler."""
        return self.several and self.found is not None and self._host == self.found.host

    @property
    def other_leader(self) -> str:
        """Which of the machines leads, where it is not this one and the scheduler knows it by that name."""
        if self.found is None or self.leads or not self.several:
            return ""
        host = split_address(self.coordinator)[0]
        return next((name for name in self.found.nodes if _same(name, host)), "")

    @property
    def notices(self) -> bool:
        return self.found is not None and self.found.notices

    @property
    def run(self) -> str:
        return "" if self.found is None else self.found.run

    @property
    def agreement(self) -> str:
        """What the secret of these machines can be called; "" where the coordinator is none of them."""
        if self.found is None or not self.several:
            return ""
        host = self._host
        is_one = self.leads or _is_address(host) or any(_same(name, host) for name in self.found.nodes)
        return self.found.agreement if is_one else ""

    @property
    def _host(self) -> str:
        """Of the coordinator; "" where that may be anywhere."""
        return "" if _is_url(self.coordinator) else split_address(self.coordinator)[0]

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the other machines, where they are known."""
        return () if self.found is None else tuple(name for name in self.found.nodes if name != self.found.node)


def merge_allocations(
    slurm: SchedulerAllocation | None, torchelastic: SchedulerAllocation | None
) -> SchedulerAllocation | None:
    """Of what two have said: Slurm's, where it has started this on every machine, with what it leaves open."""
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
    """What options say, and for what they do not say, the scheduler. ``is_mine``: an address is this machine's."""
    if found is None:
        if wanted.coordinator_here and not wanted.coordinator:
            raise PolicyError("--coordinator-here needs --coordinator HOST:PORT, where the other machines find it")
        return _as_told(wanted, None)
    if not found.in_step:
        return _in_a_shell(wanted, found)
    least = _enough(wanted, found)
    if found.most == 1:
        return _as_told(wanted, found)
    if wanted.simulated:
        raise PolicyError(
            f"--simulate-nodes and {found.said}: every one of {found.most} machines would simulate a job of its own. "
            "Leave the option out, or start `elastic run` on one machine alone"
        )
    coordinator, leads = _coordinator(wanted, found, is_mine)
    return NodeLaunch(
        nnodes=wanted.nnodes or least,
        nproc=wanted.nproc or found.nproc or 1,
        node=wanted.node or found.node,
        coordinator=coordinator,
        leads=leads,
        found=found,
    )


def _as_told(wanted: RunOptions, found: SchedulerAllocation | None) -> NodeLaunch:
    """One machine, or several as options say."""
    return NodeLaunch(
        nnodes=wanted.nnodes or "1",
        nproc=wanted.nproc or (found.nproc if found is not None else None) or 1,
        node=wanted.node or (found.node if found is not None and not wanted.simulated else ""),
        coordinator=wanted.coordinator,
        leads=not wanted.coordinator or wanted.coordinator_here,
        found=found,
    )


def _in_a_shell(wanted: RunOptions, found: SchedulerAllocation) -> NodeLaunch:
    """Of a job that has machines, on which nothing has been started."""
    alone = wanted.simulated or wanted.coordinator or (wanted.nnodes and node_range(wanted.nnodes)[1] == 1)
    if found.most > 1 and not alone:
        raise PolicyError(
            f"{found.said} has {found.most} machines, and this is no step on them: only this one would run, and wait "
            "for the others. Start it on all: srun --ntasks-per-node=1 elastic run ...; for this machine alone, write "
            "--nnodes 1"
        )
    return _as_told(wanted, found)


def _enough(wanted: RunOptions, found: SchedulerAllocation) -> str:
    """The scheduler's number of nodes as ``--nnodes`` has it; what the option says must not be more."""
    if wanted.nnodes is not None and not wanted.simulated and (found.most > 1 or not wanted.coordinator):
        least = node_range(wanted.nnodes)[0]
        if least > found.most:
            raise PolicyError(
                f"--nnodes {wanted.nnodes} and {found.said}: {least} nodes at least would be waited for, and there are "
                f"{found.most}"
            )
    return str(found.most) if found.least == found.most else f"{found.least}:{found.most}"


def _coordinator(wanted: RunOptions, found: SchedulerAllocation, is_mine: Callable[[str], bool]) -> tuple[str, bool]:
    """Where it is, and whether that is here."""
    if _is_url(wanted.coordinator):  # where it is noted who leads, which may be any of them
        return wanted.coordinator, False
    host, port = split_address(wanted.coordinator) if wanted.coordinator else ("", found.port)
    if is_wildcard_host(host):
        host = found.host
    if not host:
        raise PolicyError(f"{found.said}, and nothing says where the coordinator is: write --coordinator HOST:PORT")
    leader = next((name for name in found.nodes if _same(name, host)), "")
    if leader:
        leads = leader == found.node
    elif _same(host, found.host) or is_loopback_host(host):
        leads = found.leads
    else:  # an address of one of the machines, or somewhere else
        leads = wanted.coordinator_here or (_is_address(host) and is_mine(host))
    if wanted.coordinator_here and not leads:
        raise PolicyError(
            f"--coordinator-here and {found.said}: the coordinator is on {leader or host}, and this is "
            f"{found.node or 'another machine'}. Leave --coordinator-here out: who leads follows from the address"
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


def _same(one: str, other: str) -> bool:
    """One machine's names, with and without a domain."""
    if one == other:
        return True
    short = one.partition(".")[0]
    return short == other.partition(".")[0] and short in (one, other) and not short.isdigit()
