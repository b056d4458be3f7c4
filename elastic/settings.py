"""Environment variables of the package. No other module here reads them."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from elastic.control.control_messages import SupervisorEndpoint
from elastic.control.hang_detector import HangTimeouts
from elastic.errors import ControlPlaneUnavailableError, PolicyError
from elastic.schedulers import slurm, torchelastic
from elastic.schedulers.allocation import SchedulerAllocation, merge_allocations
from elastic.world.scaling_policy import ScalingPolicy
from peerstore.transport.authentication import read_secret
from tieredckpt.event_log import EVENT_LOG_ENV
from tieredckpt.settings import AgentSettings, load_settings

SOCKET_VARIABLE = "ELASTIC_SOCKET"
"""Unix socket of the supervisor. ``elastic run`` sets it for each rank."""
TOKEN_VARIABLE = "ELASTIC_TOKEN"  # noqa: S105 - the name of a variable
"""Token of a rank for its supervisor. ``elastic run`` sets it for each rank."""
SHARED_DIRECTORY = "ELASTIC_SHARED_DIRECTORY"
"""Directory that all nodes of a Slurm job share, for the secret of the job. Default: ``~/.elastic``."""
ROOTLESS_VARIABLE = "ELASTIC_ROOTLESS"
"""1: every node runs a part of the rendezvous store. 0, the default: one server holds all keys."""
SECRET_VARIABLE = "ELASTIC_SECRET"  # noqa: S105 - the name of a variable
"""Secret that all nodes of a job share, or ``file:/path`` of it."""
HANG = "ELASTIC_HANG_TIMEOUT"
"""Seconds without a finished step after which a job counts as hung, ``auto`` (the default) or ``off``."""
FIRST_STEP = "ELASTIC_FIRST_STEP_TIMEOUT"
"""``ELASTIC_HANG_TIMEOUT`` of the first step after a start: seconds, ``auto`` (default) or ``off``."""
ABORT = "ELASTIC_ABORT_TIMEOUT"
"""Seconds that a process may take to leave the world after a fault, at least 1. Default: 10."""
SHARED_AGENT_VARIABLE = "ELASTIC_SHARED_AGENT"
"""Directory of this machine's agent. ``elastic run`` sets it for simulated nodes."""
BATCH_CACHE_VARIABLE = "ELASTIC_BATCH_CACHE_DIRECTORY"
"""Directory of prepared batches. Default: ``/dev/shm/elastic-batch-cache-UID``."""
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def supervisor_endpoint(environ: Mapping[str, str] = os.environ) -> SupervisorEndpoint:
    """Return the endpoint that the supervisor set, or raise :class:`ControlPlaneUnavailableError`."""
    socket, token = environ.get(SOCKET_VARIABLE, ""), environ.get(TOKEN_VARIABLE, "")
    if not socket or not token:
        raise ControlPlaneUnavailableError(
            f"${SOCKET_VARIABLE} and ${TOKEN_VARIABLE} are not set: start the script with `elastic run SCRIPT`"
        )
    return SupervisorEndpoint(Path(socket), token)


def is_supervised(environ: Mapping[str, str] = os.environ) -> bool:
    return SOCKET_VARIABLE in environ and TOKEN_VARIABLE in environ


def shared_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$ELASTIC_SHARED_DIRECTORY`` or ``~/.elastic``, for secrets that a job's machines share."""
    return Path(environ.get(SHARED_DIRECTORY) or "~/.elastic").expanduser().absolute()


def allocation(environ: Mapping[str, str] = os.environ) -> SchedulerAllocation | None:
    """Return the allocation that Slurm (``SLURM_*``) or Kubeflow (``PET_*``) describes, or ``None``."""
    kubeflow = torchelastic.torchelastic_allocation(
        environ,
        host=socket.gethostname(),
        accelerators=len([*Path("/dev").glob("nvidia[0-9]*")]),
        processors=len(os.sched_getaffinity(0)),
    )
    return merge_allocations(slurm.slurm_allocation(environ), kubeflow)


def event_log_directory(logs: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the event log directory: ``$TIEREDCKPT_EVENT_LOG``, or one in ``logs``."""
    return Path(environ.get(EVENT_LOG_ENV, "") or logs / "event-log").absolute()


def secret_variable(environ: Mapping[str, str] = os.environ) -> str:
    """Return ``$ELASTIC_SECRET``: the secret, ``file:/path``, or ""."""
    return environ.get(SECRET_VARIABLE, "")


def load_secret(option: str, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the job's secret from ``--secret`` or the environment, or ``None``."""
    if option and not option.startswith("file:"):
        raise PolicyError(
            "--secret: write file:/path. Any user of the machine can read a command line, so this secret is no longer "
            "safe. Make a new one: umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' > /path"
        )
    secret = option or secret_variable(environ)
    return read_secret(secret) if secret else None


def gloo_on(interface: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that bind gloo to an interface, unless the environment names one.

    By default gloo listens on the address of the host name, and accepts connections without authentication.
    """
    return {GLOO_INTERFACE_VARIABLE: environ.get(GLOO_INTERFACE_VARIABLE, interface)}


def has_peer_secret(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the configuration has a secret for the nodes' agents."""
    return bool(load_settings(environ).peer.secret)


def has_agent_name(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the configuration names this node's agent."""
    return bool(load_settings(environ).agent.node)


def has_agent_address(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the configuration names the address at which this node's agent listens."""
    return load_settings(environ).agent.peers != AgentSettings().peers


def has_agent_directory(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the configuration sets the directory of this machine's agent."""
    return bool(load_settings(environ).agent.directory)


def default_agent_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the agent that processes of this machine use by default."""
    return load_settings(environ).agent_directory


def shared_agent_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the agent directory that ``elastic run`` set for a simulated node, or ""."""
    return environ.get(SHARED_AGENT_VARIABLE, "")


def wants_rootless_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``$ELASTIC_ROOTLESS`` requests a store on every node. The default is one store."""
    value = environ.get(ROOTLESS_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise PolicyError(f"${ROOTLESS_VARIABLE}={value!r}: 0 or 1 was expected")
    return value == "1"


def hang_limits(
    step: str, first: str, names: tuple[str, str] = ("--hang-timeout", "--first-step-timeout")
) -> HangTimeouts:
    """Parse the hang limits: seconds, ``auto`` or ``off``. ``names`` are the options for error messages."""
    return HangTimeouts(_limit(names[0], step), _limit(names[1], first))


def hang_limits_in(environ: Mapping[str, str] = os.environ) -> HangTimeouts:
    """Return the hang limits of a process without ``elastic run``, for example under ``torchrun``."""
    step, first = environ.get(HANG, "") or "auto", environ.get(FIRST_STEP, "") or "auto"
    return hang_limits(step, first, (f"${HANG}", f"${FIRST_STEP}"))


def abort_timeout_in(environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds to leave a broken world, for a process without ``elastic run``."""
    value = environ.get(ABORT, "")
    try:
        seconds = float(value) if value else ScalingPolicy().abort_timeout_s
    except ValueError:
        seconds = 0.0
    if not math.isfinite(seconds) or seconds < 1:
        raise PolicyError(f"${ABORT} {value!r}: write a number of seconds, at least 1")
    return seconds


def has_hang_limit(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment sets a hang limit."""
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


def batch_cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$ELASTIC_BATCH_CACHE_DIRECTORY``, or this user's directory in ``/dev/shm``."""
    directory = environ.get(BATCH_CACHE_VARIABLE)
    return Path(directory) if directory else Path("/dev/shm") / f"elastic-batch-cache-{os.getuid()}"  # noqa: S108
