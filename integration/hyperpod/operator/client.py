"""What is said to agents over HTTP, to all of them at once.

Agents run what a tenant gave them, beside other tenants'. One that is slow, gone or talks nonsense costs its own time
limit and nobody else's: a call is over at its deadline whatever arrives, no answer is read further than any agent's
could be, one job's agents have a part of the threads and a bound together, and no proxy of the environment is asked.
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from integration.hyperpod.operator.actions import Action, Shutdown, Start, Stop, Update
from integration.hyperpod.operator.seen import Answer, read_answer
from peerstore.transport.addresses import split_address

_LIMIT_BYTES = 1 << 20
"""Worker data and labels of all ranks of a node are in an answer, a few kilobytes."""
_JOB_BYTES = 64 << 20
"""All answers of one job's agents together, as long as they are looked at."""
_AT_ONCE = 256
_OF_ONE_JOB = 32

T = TypeVar("T")
K = TypeVar("K")


class Heard(NamedTuple):
    """An answer; or none, and why."""

    answer: Answer | None
    problem: str = ""


class AgentClient:
    """Any number of agents; each call at most ``timeout_s``."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="agent-client")

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown()

    def ask_all(self, addresses: Mapping[str, str]) -> dict[str, Heard]:
        """What each agent says, by the pod's name."""
        return self._all(partial(self._ask, _Room(_JOB_BYTES)), addresses.items())

    def tell_all(self, actions: Iterable[Action], addresses: Mapping[str, str]) -> dict[str, str]:
        """Carry out every call to an agent; what went wrong, by the pod's name. The next look says it again."""
        calls = [
            (one.pod, (addresses[one.pod], *told))
            for one in actions
            if one.pod in addresses and (told := _call(one)) is not None
        ]
        said = self._all(lambda call: self._tell(*call), calls)
        return {pod: problem for pod, problem in said.items() if problem}

    def _all(self, do: Callable[[T], K], whom: Iterable[tuple[str, T]]) -> dict[str, K]:
        """Those of one job; never more than its part of the threads at a time."""
        begun: dict[Future[K], str] = {}
        found: dict[str, K] = {}
        for pod, what in whom:
            if len(begun) == _OF_ONE_JOB:
                for one in wait(begun, return_when=FIRST_COMPLETED).done:
                    found[begun.pop(one)] = one.result()
            begun[self._threads.submit(do, what)] = pod
        return found | {pod: one.result() for one, pod in begun.items()}

    def _ask(self, room: _Room, address: str) -> Heard:
        try:
            return Heard(read_answer(room.taken(self._request(address, "GET", "/status"))))
        except msgspec.MsgspecError as nonsense:
            return Heard(None, f"{address} is no agent: {nonsense}")
        except (OSError, http.client.HTTPException, ValueError) as gone:
            return Heard(None, f"{address}: {gone or type(gone).__name__}")

    def _tell(self, address: str, path: str, body: bytes | None) -> str:
        try:
            self._request(address, "POST", path, body)
        except (OSError, http.client.HTTPException, ValueError) as wrong:
            return f"{path} to {address}: {wrong or type(wrong).__name__}"
        return ""

    def _request(self, address: str, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = _Connection(address, self._timeout_s)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            found = reply.read()
        finally:
            connection.end()
        if reply.status != http.client.OK:
            raise ValueError(f"{reply.status} {found[:500].decode(errors='replace')}".strip())
        return found


class _Room:
    """For the answers of one job's agents."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._lock = threading.Lock()

    def taken(self, answer: bytes) -> bytes:
        with self._lock:
            self._left -= len(answer)
            if self._left < 0:
                raise ValueError(f"all answers of this job's agents have more than {_JOB_BYTES} bytes together")
        return answer


class _Connection(http.client.HTTPConnection):
    """One request and its answer, within a time and a size for all of it: headers, interim answers and chunks too."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, port = split_address(address)
        super().__init__(host, port, timeout=timeout_s)
        self._real: socket.socket | None = None
        self._end = time.monotonic() + timeout_s

    def connect(self) -> None:
        super().connect()
        self._real = self.sock
        self.sock = _Deadlined(self._real, self._end, self.timeout or 0.0)

    def end(self) -> None:
        self.close()
        if self._real is not None:
            self._real.close()


class _Deadlined:
    """As much of a socket as ``http.client`` uses."""

    def __init__(self, sock: socket.socket, end: float, limit_s: float) -> None:
        self._sock, self._end, self._limit_s = sock, end, limit_s

    def sendall(self, data: Any) -> None:
        self.hurry()
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Received(self, self._sock))

    def close(self) -> None:
        """Not yet: ``http.client`` closes it as soon as it knows that there is one answer, and reads that after."""

    def hurry(self) -> None:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it was not done within {self._limit_s:g} s")
        self._sock.settimeout(left_s)


class _Received(io.RawIOBase):
    def __init__(self, deadline: _Deadlined, sock: socket.socket) -> None:
        self._deadline, self._sock = deadline, sock
        self._left = _LIMIT_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._deadline.hurry()
        count = self._sock.recv_into(into)
        self._left -= count
        if self._left < 0:
            raise OSError(f"an answer of more than {_LIMIT_BYTES} bytes")
        return count


def _call(action: Action) -> tuple[str, bytes | None] | None:
    """Path and body; nothing for what is done to a pod rather than said to its agent."""
    if isinstance(action, (Start, Update)):
        path = "/start" if isinstance(action, Start) else "/update"
        return path, msgspec.json.encode(action.body)
    if isinstance(action, Stop):
        return "/stop", msgspec.json.encode(action.body)
    if isinstance(action, Shutdown):
        return "/shutdown", None
    return None
