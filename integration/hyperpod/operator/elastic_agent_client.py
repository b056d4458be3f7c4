"""HTTP client of many elastic agents at once, with deadlines and size limits.

Agents run what a tenant gave them, beside other tenants'. One that is slow, gone or talks nonsense costs its own time
limit and nobody else's: a call is over at its deadline whatever arrives, no answer is read further than any agent's
could be, and no proxy of the environment is asked. One thread moves the bytes of all calls, so that silent agents,
however many, hold nothing that another job's need; what came is read by whoever asked.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from integration.hyperpod.operator.decision import OperatorAction, ShutdownAgent, StartAgent, StopAgent, UpdateAgent
from integration.hyperpod.operator.observed_pods import AgentStatus, parse_agent_status
from peerstore.network_addresses import join_address, split_address

_LIMIT_BYTES = 1 << 20
"""Worker data and labels of all ranks of a node are in an answer, a few kilobytes."""
_JOB_BYTES = 64 << 20
"""All answers of one job's agents together, as long as they are looked at."""
_MAX_THREADS_PER_JOB = 32
"""Calls at a time."""
_PIECE_BYTES = 1 << 16

_Call = tuple[str, str, str, "bytes | None"]
"""Address, method, path and body."""


class AgentReply(NamedTuple):
    """An answer; or none, and why."""

    status: AgentStatus | None
    error: str = ""


class ElasticAgentClient:
    """Any number of agents; each call at most ``timeout_s``. Any thread may ask, for one job at a time."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> ElasticAgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Whoever asks yet is told nothing more."""
        asyncio.run_coroutine_threadsafe(_cancelled(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def poll_all(self, addresses: Mapping[str, str]) -> dict[str, AgentReply]:
        """What each agent says, by the pod's name."""
        said = self._all({pod: (address, "GET", "/status", None) for pod, address in addresses.items()})
        return {pod: _heard(addresses[pod], answer) for pod, answer in said.items()}

    def send_all(self, actions: Iterable[OperatorAction], addresses: Mapping[str, str]) -> dict[str, str]:
        """Carry out every call to an agent; what went wrong, by the pod's name. The next look says it again."""
        problems: dict[str, str] = {}
        calls = [(one.pod, told) for one in actions if one.pod in addresses and (told := _call(one)) is not None]
        while calls:  # one after the other for each agent, in their order
            now = dict(reversed(calls))
            said = self._all({pod: (addresses[pod], "POST", *told) for pod, told in now.items()})
            for pod, answer in said.items():
                try:
                    _body_of(answer)
                except _WRONG as wrong:
                    problems[pod] = f"{now[pod][0]} to {addresses[pod]}: {wrong or type(wrong).__name__}"
            calls = [one for at, one in enumerate(calls) if one[0] in {pod for pod, _ in calls[:at]}]
        return problems

    def _all(self, calls: Mapping[str, _Call]) -> dict[str, bytes | Exception]:
        """What came back of each, as it came."""
        if not calls:
            return {}
        return asyncio.run_coroutine_threadsafe(self._of_one_job(calls), self._loop).result()

    async def _of_one_job(self, calls: Mapping[str, _Call]) -> dict[str, bytes | Exception]:
        places = asyncio.Semaphore(_MAX_THREADS_PER_JOB)
        left = [_JOB_BYTES]

        async def one(call: _Call) -> bytes | Exception:
            async with places:
                try:
                    said = await asyncio.wait_for(_exchanged(*call), self._timeout_s)
                except asyncio.TimeoutError:
                    return TimeoutError(f"timed out: it was not done within {self._timeout_s:g} s")
                except OSError as wrong:
                    return OSError(wrong.errno, os.strerror(wrong.errno)) if wrong.errno else wrong
                except ValueError as wrong:
                    return wrong
            left[0] -= len(said)
            if left[0] < 0:
                return ValueError(f"all answers of this job's agents have more than {_JOB_BYTES} bytes together")
            return said

        found = await asyncio.gather(*(one(call) for call in calls.values()))
        return dict(zip(calls, found, strict=True))


_WRONG = (OSError, http.client.HTTPException, ValueError)


async def _cancelled() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _exchanged(address: str, method: str, path: str, body: bytes | None) -> bytes:
    """Everything that an agent says until it closes the connection, which it is asked to do."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {join_address(host, port)}", "Connection: close"]
        if body is not None:
            lines.append("Content-Type: application/json")
        if method == "POST":
            lines.append(f"Content-Length: {len(body or b'')}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        said = bytearray()
        while piece := await reader.read(_PIECE_BYTES):
            said += piece
            if len(said) > _LIMIT_BYTES:
                raise OSError(f"an answer of more than {_LIMIT_BYTES} bytes")
        return bytes(said)
    finally:
        writer.transport.abort()


def _heard(address: str, said: bytes | Exception) -> AgentReply:
    try:
        return AgentReply(parse_agent_status(_body_of(said)))
    except msgspec.MsgspecError as nonsense:
        return AgentReply(None, f"{address} is no agent: {nonsense}")
    except _WRONG as gone:
        return AgentReply(None, f"{address}: {gone or type(gone).__name__}")


def _body_of(said: bytes | Exception) -> bytes:
    """Of a good answer; raises what is wrong with any other."""
    if isinstance(said, Exception):
        raise said
    reply = http.client.HTTPResponse(_Said(said))  # type: ignore[arg-type]
    reply.begin()
    found = reply.read()
    if reply.status != http.client.OK:
        raise ValueError(f"{reply.status} {found[:500].decode(errors='replace')}".strip())
    return found


class _Said:
    """As much of a socket as ``http.client`` reads an answer from."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def makefile(self, _mode: str) -> Any:
        return io.BytesIO(self._said)


def _call(action: OperatorAction) -> tuple[str, bytes | None] | None:
    """Path and body; nothing for what is done to a pod rather than said to its agent."""
    if isinstance(action, (StartAgent, UpdateAgent)):
        path = "/start" if isinstance(action, StartAgent) else "/update"
        return path, msgspec.json.encode(action.body)
    if isinstance(action, StopAgent):
        return "/stop", msgspec.json.encode(action.body)
    if isinstance(action, ShutdownAgent):
        return "/shutdown", None
    return None
