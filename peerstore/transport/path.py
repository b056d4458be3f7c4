"""How fast the way to a peer is, and whether that is what its link could do."""

from __future__ import annotations

import time
from collections.abc import Callable

from peerstore.errors import PeerUnreachableError
from peerstore.transport.addresses import interface_of, link_bytes_per_s, local_address_for
from peerstore.transport.seam import Channel

_PIECE_BYTES = 1 << 20
_FAR_BELOW = 0.1
"""One stream of one process does not fill a fast link; a tenth of it is the wrong way."""
_ANSWER_S = 60.0


def measure(
    channel: Channel,
    header: bytes,
    *,
    size_bytes: int = 32 << 20,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes per second to the peer, which answers each message that has ``header`` with :func:`answer_measure`.

    The best of some rounds: what else goes on slows it down, nothing speeds it up.
    """
    piece = memoryview(bytes(min(_PIECE_BYTES, size_bytes)))
    payload = [piece] * (size_bytes // piece.nbytes)
    best = 0.0
    for _ in range(rounds):
        begun = clock()
        channel.send(header, payload)
        if channel.receive(idle_s=_ANSWER_S) is None:
            raise PeerUnreachableError(f"{channel.peer} closed the connection while the way to it was measured")
        channel.discard()
        best = max(best, piece.nbytes * len(payload) / max(clock() - begun, 1e-9))
    return best


def answer_measure(channel: Channel, header: bytes = b"") -> None:
    """The other side of :func:`measure`, once its message has come."""
    channel.discard()
    channel.send(header)


def link_to(peer_address: str) -> tuple[str, float | None]:
    """The interface by which this machine reaches ``peer_address``, and its link's bytes per second, if it says."""
    local = local_address_for(peer_address)
    interface = interface_of(local)
    return (interface, link_bytes_per_s(interface)) if interface else (local, None)


def slow_path(measured: float, link: float | None, *, way: str = "the way to this peer") -> str | None:
    """What to tell the operator when ``measured`` is far below ``link`` (both in bytes per second)."""
    if link is None or measured >= link * _FAR_BELOW:
        return None
    return (
        f"{way} moves {measured / 1e9:.3g} GB/s, {measured / link:.1%} of what its link could ({link / 1e9:.3g} GB/s): "
        "is it the network that is meant for this? Name another interface, or look for what else uses this one"
    )
