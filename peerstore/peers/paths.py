"""How fast the ways to the other nodes turned out to be, and a word when one is far below its link."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from peerstore.errors import PeerStoreError
from peerstore.transport.path import link_to, slow_path

log = logging.getLogger(__name__)

_LEAST_BYTES = 8 << 20
"""What is sent in less time than a few round trips says little about the way."""
_KEPT = 0.3
"""How much the newest transfer counts."""

Link = Callable[[str], tuple[str, float | None]]


class Paths:
    """What transfers have shown. Any thread may call."""

    def __init__(self, *, link: Link = link_to) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        self._warned: set[str] = set()

    def took(self, node: str, address: str, size_bytes: int, seconds: float) -> None:
        """So many bytes went to ``node`` without a limit on them."""
        if size_bytes < _LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            before = self._rates.get(node)
            rate = size_bytes / seconds
            self._rates[node] = rate if before is None else (1 - _KEPT) * before + _KEPT * rate
            known = node in self._warned
        if not known:
            self._judge(node, address)

    def _judge(self, node: str, address: str) -> None:
        try:
            interface, link = self._link(address)
        except (PeerStoreError, OSError) as error:
            log.debug("the way to %s is not known: %s", node, error)
            return
        words = slow_path(self._rates[node], link, way=f"the way to {node} ({address}, by {interface})")
        if words is not None:
            log.warning("%s", words)
            with self._lock:
                self._warned.add(node)

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second to each node, as measured last."""
        with self._lock:
            return dict(self._rates)
