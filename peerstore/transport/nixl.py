"""Large payloads by NIXL (InfiniBand, EFA, shared memory: whatever its backend finds), the rest by TCP.

Who may connect is decided over TCP, by the handshake; until then nothing is offered or read. NIXL itself asks nobody
who they are: the network it uses has to be one where everybody is trusted. A payload that was changed is noticed by
those who verify it, as always.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial

from peerstore.transport.offering import OfferingChannel
from peerstore.transport.registered import Registered, bindings
from peerstore.transport.seam import Channel, Listener, Transport
from peerstore.transport.tcp import TcpTransport


class NixlTransport:
    """``carrier`` finds peers and carries what is small; ``backend`` and its ``options`` are NIXL's. Which adapters UCX
    uses is for its own variables to say (``UCX_NET_DEVICES=mlx5_0:1``).

    From its first use on it holds ``buffers`` times ``buffer_bytes`` of registered memory, for all channels together.
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
        bindings()  # or nothing will work
        self._carrier = carrier or TcpTransport(timeout_s=timeout_s)
        self._least_bytes = least_bytes
        self._register = partial(
            Registered, backend, options or {}, buffer_bytes=buffer_bytes, buffers=buffers, timeout_s=timeout_s
        )
        self._lock = threading.Lock()
        self._registered: Registered | None = None

    def listen(self, address: str, serve: Callable[[Channel], None]) -> Listener:
        memory = self._memory  # so that a backend that is not there is said to who starts, not to who connects
        return self._carrier.listen(address, partial(self._serve, memory, serve))

    def connect(self, address: str, *, timeout_s: float = 5.0) -> Channel:
        return OfferingChannel(self._carrier.connect(address, timeout_s=timeout_s), self._memory, self._least_bytes)

    def close(self) -> None:
        """Give the registered memory back, after all listeners and channels were closed."""
        with self._lock:
            registered, self._registered = self._registered, None
        if registered is not None:
            registered.close()

    @property
    def _memory(self) -> Registered:
        """Registered by the first channel: most processes of a job never open one."""
        with self._lock:
            if self._registered is None:
                self._registered = self._register()
            return self._registered

    def _serve(self, memory: Registered, serve: Callable[[Channel], None], carrier: Channel) -> None:
        with contextlib.closing(OfferingChannel(carrier, memory, self._least_bytes)) as channel:
            serve(channel)
