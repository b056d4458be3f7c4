"""What a rank is told by its environment, and the only place here that reads it."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.control.movement import HangLimits
from elastic.errors import ControlLostError, PolicyError
from elastic.schedulers import slurm, torchelastic
from elastic.schedulers.allocation import Allocation, agreed
from peerstore.transport.secret import read_secret
from tieredckpt.ledger import LEDGER
from tieredckpt.settings import load_settings

SOCKET = "ELASTIC_SOCKET"
TOKEN = "ELASTIC_TOKEN"  # noqa: S105 - the name of a variable
RUN_DIRECTORY = "ELASTIC_RUN_DIRECTORY"
SHARED_DIRECTORY = "ELASTIC_SHARED_DIRECTORY"
ROOTLESS_SWITCH = "ELASTIC_ROOTLESS"
SECRET = "ELASTIC_SECRET"  # noqa: S105 - the name of a variable
HANG = "ELASTIC_HANG_TIMEOUT"
FIRST_STEP = "ELASTIC_FIRST_STEP_TIMEOUT"
GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankSeat:
    """Where a rank finds its supervisor, and what proves that it was started by it."""

    socket: Path
    token: str


def seat_from(environ: Mapping[str, str] = os.environ) -> RankSeat:
    """What the supervisor put there, or :class:`ControlLostError` where none did."""
    socket, token = environ.get(SOCKET, ""), environ.get(TOKEN, "")
    if not socket or not token:
        raise ControlLostError(f"${SOCKET} and ${TOKEN} are not set: start the script with `elastic run SCRIPT`")
    return RankSeat(Path(socket), token)


def is_supervised(environ: Mapping[str, str] = os.environ) -> bool:
    return SOCKET in environ and TOKEN in environ


def run_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the run files of this user's jobs are: ``$ELASTIC_RUN_DIRECTORY``, or on the machine's shared memory."""
    named = environ.get(RUN_DIRECTORY)
    return Path(named) if named else Path("/dev/shm") / f"elastic-{os.getuid()}"  # noqa: S108


def shared_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a job's machines find what only this user may read: ``$ELASTIC_SHARED_DIRECTORY``, or below home."""
    return Path(environ.get(SHARED_DIRECTORY) or "~/.elastic").expanduser().absolute()


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """What Slurm (``SLURM_*``) or Kubeflow (``PET_*``) says of the job this process is in."""
    pet = torchelastic.allocation(
        environ,
        host=socket.gethostname(),
        accelerators=len([*Path("/dev").glob("nvidia[0-9]*")]),
        processors=len(os.sched_getaffinity(0)),
    )
    return agreed(slurm.allocation(environ), pet)


def ledger_directory(logs: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Where what happens to a job is written down: ``$TIEREDCKPT_LEDGER``, or beside what its ranks print."""
    return Path(environ.get(LEDGER, "") or logs / "ledger").absolute()


def secret_in(environ: Mapping[str, str] = os.environ) -> str:
    """``$ELASTIC_SECRET``: the secret, or ``file:/path``; "" where it is not set."""
    return environ.get(SECRET, "")


def secret_from(option: str, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """What all nodes of a job know, as ``--secret`` or the environment says; ``None`` where neither does."""
    if option and not option.startswith("file:"):
        raise PolicyError(
            "--secret: write file:/path. Everybody on the machine can read a command line, so a secret that was there "
            "is none any more. Make a new one: (umask 077; python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))' > /path)"
        )
    given = option or secret_in(environ)
    return read_secret(given) if given else None


def gloo_on(interface: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What keeps gloo on an interface: else it listens where the host's name leads, and asks nobody who connects."""
    return {GLOO: environ.get(GLOO, interface)}


def has_peer_secret(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether nodes' agents have a secret of their own."""
    return bool(load_settings(environ).peer.secret)


def has_agent_name(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this node's agent has a name of its own."""
    return bool(load_settings(environ).agent.node)


def has_agent_directory(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody has said where this machine's agent is."""
    return bool(load_settings(environ).agent.directory)


def is_rootless(environ: Mapping[str, str] = os.environ) -> bool:
    """``$ELASTIC_ROOTLESS``: 1 for a store on every node; 0, or not set, for one in all."""
    said = environ.get(ROOTLESS_SWITCH, "")
    if said not in ("", "0", "1"):
        raise PolicyError(f"${ROOTLESS_SWITCH}={said!r}: 0 or 1 was expected")
    return said == "1"


def hang_limits(
    step: str, first: str, names: tuple[str, str] = ("--hang-timeout", "--first-step-timeout")
) -> HangLimits:
    """Seconds, ``auto`` or ``off``."""
    return HangLimits(_limit(names[0], step), _limit(names[1], first))


def hang_limits_in(environ: Mapping[str, str] = os.environ) -> HangLimits:
    """The same, where there is no command line of ours: under ``torchrun`` and HyperPod's agent."""
    step, first = environ.get(HANG, "") or "auto", environ.get(FIRST_STEP, "") or "auto"
    return hang_limits(step, first, (f"${HANG}", f"${FIRST_STEP}"))


def has_hang_limit(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody has said how long a step may take."""
    return bool(environ.get(HANG))


def _limit(option: str, text: str) -> float | None:
    if text == "auto":
        return None
    try:
        seconds = 0.0 if text == "off" else float(text)
    except ValueError:
        seconds = -1.0
    if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and text != "off"):
        raise PolicyError(f"{option} {text!r}: write a number of seconds above 0, auto or off")
    return seconds
