"""What is said to agents over HTTP, to all of them at once.

An agent that is slow, gone or talks nonsense costs its own time limit and nobody else's: no answer is read longer or
further than any agent's could be, and no proxy of the environment is asked.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from integration.hyperpod.operator.actions import Action, Shutdown, Start, Stop, Update
from integration.hyperpod.operator.seen import Answer, read_answer
from peerstore.transport.addresses import split_address

_LIMIT_BYTES = 16 << 20
"""Worker data and labels of all ranks of a node are in an answer."""
_PIECE_BYTES = 64 << 10
_AT_ONCE = 32

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
        return self._all(self._ask, addresses.items())

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
        begun = [(pod, self._threads.submit(do, what)) for pod, what in whom]
        return {pod: one.result() for pod, one in begun}

    def _ask(self, address: str) -> Heard:
        try:
            return Heard(read_answer(self._request(address, "GET", "/status")))
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
        end = time.monotonic() + self._timeout_s
        host, port = split_address(address)
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            found = bytearray()
            while piece := reply.read1(_PIECE_BYTES):
                found += piece
                if len(found) > _LIMIT_BYTES:
                    raise ValueError(f"an answer of more than {_LIMIT_BYTES} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"an answer that takes longer than {self._timeout_s:g} s")
        finally:
            connection.close()
        if reply.status != http.client.OK:
            raise ValueError(f"{reply.status} {bytes(found[:500]).decode(errors='replace')}".strip())
        return bytes(found)


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
