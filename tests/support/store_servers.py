"""``TCPStore`` servers in separate processes, one for each node of a world."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from tests.support.agents import stop_process
from tests.support.zygote import Zygote


class RendezvousServer:
    """One server, which a test can kill and suspend."""

    def __init__(self, zygote: Zygote) -> None:
        self._running = zygote.start(_serve)
        self.host, self.port = "127.0.0.1", 0
        self._alive = True

    def wait_started(self) -> RendezvousServer:
        self._running.wait_lines(1)
        self.port = int(self._running.lines()[0])
        return self

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def suspend(self) -> None:
        stop_process(self._running.pid)

    def resume(self) -> None:
        self._running.kill(signal.SIGCONT)

    def kill(self) -> None:
        if self._alive:
            self._alive = False
            self._running.kill()
            self._running.wait()


@contextlib.contextmanager
def server_processes(zygote: Zygote, count: int) -> Iterator[list[RendezvousServer]]:
    servers = [RendezvousServer(zygote) for _ in range(count)]
    try:
        yield [server.wait_started() for server in servers]
    finally:
        for server in servers:
            server.kill()


def _serve(say: Callable[[str], object]) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    say(str(store.port))
    signal.pause()
