"""What an operator does next: calls to agents, and pods that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from integration.hyperpod.operator.seen import Progress
from integration.hyperpod.operator.state import JobState


class StartBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/start``; of ``/update`` without its progress. ``rank`` is the node's."""

    rank: int
    nnodes: int
    fault_count: int = msgspec.field(name="faultCount")
    master_addr: str
    master_port: str
    version: str = msgspec.field(name="ipVersion")
    rank_ips: tuple[Mapping[str, Any], ...] = msgspec.field(name="rankIps")
    worker_data: Any = None
    spare: bool = False
    progress: Mapping[str, Progress] | None = None
    rules: tuple[Mapping[str, Any], ...] | None = msgspec.field(default=None, name="log_monitoring_configuration")


class StopBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of ``/stop``."""

    restart_mode: str | None = None
    is_graceful: bool | None = None
    timeout: int | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """``POST /start``."""

    pod: str
    body: StartBody


class Update(msgspec.Struct, frozen=True, tag=True):
    """``POST /update``: ranks for processes that wait for them before they are ready, and for spares."""

    pod: str
    body: StartBody


class Stop(msgspec.Struct, frozen=True, tag=True):
    """``POST /stop``."""

    pod: str
    body: StopBody


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """``POST /shutdown``: the agent ends, and with it the pod's container."""

    pod: str


class Replace(msgspec.Struct, frozen=True, tag=True):
    """This pod is to go, at once, and another to come, which the number of wanted pods says anyway."""

    pod: str
    reason: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """This pod has nothing to do any more and none is to come for it: shut its agent down and take it away."""

    pod: str
    reason: str


Action = Start | Update | Stop | Shutdown | Replace | Release


class Event(msgspec.Struct, frozen=True):
    """Something worth telling a person; as events of Kubernetes are."""

    reason: str
    message: str
    warning: bool = False


class Wanted(msgspec.Struct, frozen=True):
    """So many pods of each replica spec there should be, spares counted, and machines they should not be on."""

    pods: Mapping[str, int]
    avoid: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now. ``state`` is stored before any of it is done."""

    state: JobState
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wanted: Wanted
    finished: bool = False
    """Nothing more will be decided: the job has ended, and so have its agents."""
