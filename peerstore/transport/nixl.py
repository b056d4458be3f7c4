"""Large payloads by NIXL (InfiniBand, EFA, shared memory: whatever its backend finds), the rest by TCP.

Who may connect is decided over TCP, by the handshake; until then nothing is offered or read. NIXL itself asks nobody
who they are: the network it uses has to be one where everybody is trusted. A payload that was changed is noticed by
those who verify it, as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from peerstore.transport.offering import OfferingChannel
from peerstore.transport.registered import Registered
from peerstore.transport.seam import Channel, Listener, Transport
from peerstore.transport.tcp import TcpTransport


class NixlTransport:
    """``carrier`` finds peers and carries what is small; ``backend`` and its ``options`` are NIXL's. Which adapters UCX
    uses is for its own variables to say (``UCX_NET_DEVICES=mlx5_0:1``).

    It holds ``buffers`` times ``buffer_bytes`` of registered memory, for all channels together.
    """

    name = "nixl"

    def __init__(
        self,
        *,
        carrier: Transport | None = None,
        backend: str = "UCX",
        options: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        buffer_bytes: int = 4 << 20,
        buffers: int = 16,
        least_bytes: int = 256 << 10,
    ) -> None:
        self._carrier = carrier or TcpTransport(timeout_s=timeout_s)
        self._least_bytes = least_bytes
        self._memory = Registered(
            backend, options or {}, buffer_bytes=buffer_bytes, buffers=buffers, timeout_s=timeout_s
        )

    def listen(self, address: str, serve: Callable[[Channel], None]) -> Listener:
        return self._carrier.listen(address, partial(self._serve, serve))

    def connect(self, address: str, *, timeout_s: float = 5.0) -> Channel:
        return OfferingChannel(self._carrier.connect(address, timeout_s=timeout_s), self._memory, self._least_bytes)

    def close(self) -> None:
        """Give the registered memory back, after all listeners and channels were closed."""
        self._memory.close()

    def _serve(self, serve: Callable[[Channel], None], carrier: Channel) -> None:
        with contextlib.closing(OfferingChannel(carrier, self._memory, self._least_bytes)) as channel:
            serve(channel)
