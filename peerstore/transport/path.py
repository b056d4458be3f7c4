"""How fast the way to a peer is, and whether that is what its link could do."""

from __future__ import annotations

from peerstore.transport.addresses import interface_of, link_bytes_per_s, local_address_for

_FAR_BELOW = 0.1
"""One stream of one process does not fill a fast link; a tenth of it is the wrong way."""


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
