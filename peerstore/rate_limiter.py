"""Token bucket that limits the bandwidth of replication."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SEND_SLICE_BYTES = 1 << 20
_SMALLEST_SLICE_BYTES = 16 << 10


class TokenBucket:
    """Token bucket with debt, so that callers are served in order. Pure."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, amount: float, now: float) -> float:
        """Return the seconds from ``now`` until ``amount`` may be sent."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        self._tokens -= amount
        return max(0.0, -self._tokens / self._rate)


class RateLimiter:
    """Bandwidth limit in bytes per second; ``rate`` 0 means no limit. Thread-safe."""

    def __init__(
        self,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        # At most 1/8 s, so that waiting threads notice a cancellation and connections do not become idle.
        limited = int(min(SEND_SLICE_BYTES, max(_SMALLEST_SLICE_BYTES, rate / 8)))
        self.slice_bytes = limited if rate else SEND_SLICE_BYTES
        """Bytes to send between two calls of ``acquire``."""
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._bucket = TokenBucket(rate, limited, clock()) if rate else None
        self._waited_s = 0.0

    @property
    def is_limited(self) -> bool:
        return self._bucket is not None

    @property
    def throttled_s(self) -> float:
        """Seconds that threads have waited, in total."""
        return self._waited_s

    def acquire(self, size_bytes: int, sleep: Callable[[float], object] | None = None) -> None:
        """Wait until ``size_bytes`` may be sent."""
        if self._bucket is None:
            return
        with self._lock:
            wait_s = self._bucket.take(size_bytes, self._clock())
            self._waited_s += wait_s
        if wait_s > 0:
            (sleep or self._sleep)(wait_s)
