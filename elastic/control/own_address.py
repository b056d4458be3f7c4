"""Where other machines reach this one, whatever it calls itself."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from peerstore.errors import PeerUnreachableError
from peerstore.transport.addresses import (
    interface_of,
    is_any,
    is_loopback,
    join_address,
    local_address_for,
    outward_address,
    resolve,
    split_address,
)

_LOOK_UP_S = 5.0
_AGAIN_S = 1.0


def own_address(coordinator: str, others: Sequence[str] = ()) -> str:
    """Of this machine, for the others of a job whose coordinator is there; some of their names help to find it."""
    if not coordinator:
        return "127.0.0.1"
    host, port = split_address(coordinator)
    if is_any(host):
        return outward_address()
    if not leads_back(coordinator):
        return local_address_for(coordinator)
    for other in others[:1]:
        with contextlib.suppress(PeerUnreachableError):
            return local_address_for(join_address(other, port))
    return outward_address()


def wait_known(coordinator: str, within_s: float) -> None:
    """Until the coordinator's name can be looked up: a pod's may be known a while after others have started."""
    host, port = split_address(coordinator)
    deadline = time.monotonic() + within_s
    while True:
        try:
            resolve(host, port, within_s=_LOOK_UP_S)
        except PeerUnreachableError as error:
            if time.monotonic() > deadline:
                raise PeerUnreachableError(
                    f"{error}; it was asked for {within_s:g} s. If that is not how this machine reaches the "
                    "coordinator, write --coordinator HOST:PORT"
                ) from error
            time.sleep(_AGAIN_S)
        else:
            return


def leads_back(coordinator: str) -> bool:
    """Whether the name by which others know this machine leads only here: Debian's /etc/hosts has 127.0.1.1 for it."""
    host, _ = split_address(coordinator)
    return not is_any(host) and not is_loopback(host) and is_loopback(local_address_for(coordinator))


def gloo_interface(host: str) -> str | None:
    """Where gloo has to listen to be reached at ``host``; ``None`` where it finds that by this machine's own name."""
    if is_loopback(host):
        return "lo" if "lo" in (known for _, known in socket.if_nameindex()) else None
    try:
        own = str(resolve(socket.gethostname(), 0, within_s=_LOOK_UP_S)[0][4][0])
    except PeerUnreachableError:
        own = "127.0.0.1"
    return interface_of(host) if is_loopback(own) else None
