"""The address at which other machines reach this node."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from peerstore.errors import PeerUnreachableError
from peerstore.network_addresses import (
    interface_with_address,
    is_loopback_host,
    is_wildcard_host,
    join_address,
    local_address_for,
    outbound_address,
    resolve_host,
    split_address,
)

_RESOLVE_S = 5.0
_RETRY_S = 1.0


def node_address(coordinator: str, others: Sequence[str] = ()) -> str:
    """Return the address of this machine for the other nodes of a job.

    ``coordinator`` is the coordinator's address, or "" for a job on one machine. If its name resolves to loopback here,
    the route to the first of ``others`` decides.
    """
    if not coordinator:
        return "127.0.0.1"
    host, port = split_address(coordinator)
    if is_wildcard_host(host):
        return outbound_address()
    if not resolves_to_loopback(coordinator):
        return local_address_for(coordinator)
    for other in others[:1]:
        with contextlib.suppress(PeerUnreachableError):
            return local_address_for(join_address(other, port))
    return outbound_address()


def wait_for_name(coordinator: str, within_s: float) -> None:
    """Wait until the coordinator's name resolves: a pod's name may appear some time after its start.

    Raise :class:`~peerstore.errors.PeerUnreachableError` after ``within_s`` seconds.
    """
    host, port = split_address(coordinator)
    deadline = time.monotonic() + within_s
    while True:
        try:
            resolve_host(host, port, within_s=_RESOLVE_S)
        except PeerUnreachableError as error:
            if time.monotonic() > deadline:
                raise PeerUnreachableError(
                    f"{error}; gave up after {within_s:g} s. If that is not how this machine reaches the "
                    "coordinator, write --coordinator HOST:PORT"
                ) from error
            time.sleep(_RETRY_S)
        else:
            return


def resolves_to_loopback(coordinator: str) -> bool:
    """Return whether the coordinator's name resolves to loopback here.

    Debian's /etc/hosts has 127.0.1.1 for the machine's own name.
    """
    host, _ = split_address(coordinator)
    return (
        not is_wildcard_host(host) and not is_loopback_host(host) and is_loopback_host(local_address_for(coordinator))
    )


def gloo_interface(host: str) -> str | None:
    """Return the interface on which gloo must listen to be reachable at ``host``.

    Return ``None`` if gloo finds it by this machine's own name.
    """
    if is_loopback_host(host):
        return "lo" if "lo" in (known for _, known in socket.if_nameindex()) else None
    try:
        own = str(resolve_host(socket.gethostname(), 0, within_s=_RESOLVE_S)[0][4][0])
    except PeerUnreachableError:
        own = "127.0.0.1"
    return interface_with_address(host) if is_loopback_host(own) else None
