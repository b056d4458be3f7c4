"""HTTP client of many elastic agents at once, with deadlines and size limits.

Agents run tenants' code, so a slow, dead or faulty agent must not delay the calls to other agents. Every call ends at
its deadline, the size of a response is limited, and proxies from the environment are ignored. One thread performs the
I/O of all calls, so silent agents occupy no thread that another job needs. The calling thread parses the responses.
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
"""Bytes of one response. Worker data and labels of a node's ranks take a few kilobytes."""
_JOB_BYTES = 64 << 20
"""Total bytes of the responses that one batch of calls of a job may hold."""
_MAX_THREADS_PER_JOB = 32
"""Concurrent calls of one job."""
_PIECE_BYTES = 1 << 16

_Call = tuple[str, str, str, "bytes | None"]
"""Address, method, path and body."""


class AgentReply(NamedTuple):
    """An agent's status, or None and the error."""

    status: AgentStatus | None
    error: str = ""


class ElasticAgentClient:
    """Client of any number of agents.

    Each call takes at most ``timeout_s`` seconds. Any thread may use it, for one job at a time.
    """

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
        """Cancel all pending calls and stop the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_other_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def poll_all(self, addresses: Mapping[str, str]) -> dict[str, AgentReply]:
        """Return each agent's status, by the name of its pod."""
        responses = self._call_all({pod: (address, "GET", "/status", None) for pod, address in addresses.items()})
        return {pod: _parse_reply(addresses[pod], response) for pod, response in responses.items()}

    def send_all(self, actions: Iterable[OperatorAction], addresses: Mapping[str, str]) -> dict[str, str]:
        """Perform all calls to agents and return the errors, by the name of the pod.

        The next reconcile repeats a failed call.
        """
        problems: dict[str, str] = {}
        calls = [
            (call.pod, request)
            for call in actions
            if call.pod in addresses and (request := _request_of(call)) is not None
        ]
        while calls:  # at most one call at a time to each agent, in the order of the actions
            batch = dict(reversed(calls))
            responses = self._call_all({pod: (addresses[pod], "POST", *request) for pod, request in batch.items()})
            for pod, response in responses.items():
                try:
                    _response_body(response)
                except _CALL_ERRORS as error:
                    problems[pod] = f"{batch[pod][0]} to {addresses[pod]}: {error or type(error).__name__}"
            calls = [call for index, call in enumerate(calls) if call[0] in {pod for pod, _ in calls[:index]}]
        return problems

    def _call_all(self, calls: Mapping[str, _Call]) -> dict[str, bytes | Exception]:
        """Return the raw response or the error of each call."""
        if not calls:
            return {}
        return asyncio.run_coroutine_threadsafe(self._run_calls(calls), self._loop).result()

    async def _run_calls(self, calls: Mapping[str, _Call]) -> dict[str, bytes | Exception]:
        semaphore = asyncio.Semaphore(_MAX_THREADS_PER_JOB)
        remaining = [_JOB_BYTES]

        async def run_call(call: _Call) -> bytes | Exception:
            async with semaphore:
                try:
                    response = await asyncio.wait_for(_exchange(*call), self._timeout_s)
                except asyncio.TimeoutError:
                    return TimeoutError(f"timed out: it was not done within {self._timeout_s:g} s")
                except OSError as error:
                    return OSError(error.errno, os.strerror(error.errno)) if error.errno else error
                except ValueError as error:
                    return error
            remaining[0] -= len(response)
            if remaining[0] < 0:
                return ValueError(f"all answers of this job's agents have more than {_JOB_BYTES} bytes together")
            return response

        responses = await asyncio.gather(*(run_call(call) for call in calls.values()))
        return dict(zip(calls, responses, strict=True))


_CALL_ERRORS = (OSError, http.client.HTTPException, ValueError)


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _exchange(address: str, method: str, path: str, body: bytes | None) -> bytes:
    """Return the raw response, up to the end of the connection, which the agent closes."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {join_address(host, port)}", "Connection: close"]
        if body is not None:
            lines.append("Content-Type: application/json")
        if method == "POST":
            lines.append(f"Content-Length: {len(body or b'')}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        response = bytearray()
        while piece := await reader.read(_PIECE_BYTES):
            response += piece
            if len(response) > _LIMIT_BYTES:
                raise OSError(f"an answer of more than {_LIMIT_BYTES} bytes")
        return bytes(response)
    finally:
        writer.transport.abort()


def _parse_reply(address: str, response: bytes | Exception) -> AgentReply:
    try:
        return AgentReply(parse_agent_status(_response_body(response)))
    except msgspec.MsgspecError as error:
        return AgentReply(None, f"{address} is no agent: {error}")
    except _CALL_ERRORS as error:
        return AgentReply(None, f"{address}: {error or type(error).__name__}")


def _response_body(response: bytes | Exception) -> bytes:
    """Return the body of a successful response; raise the error of any other."""
    if isinstance(response, Exception):
        raise response
    reply = http.client.HTTPResponse(_ResponseBytes(response))  # type: ignore[arg-type]
    reply.begin()
    body = reply.read()
    if reply.status != http.client.OK:
        raise ValueError(f"{reply.status} {body[:500].decode(errors='replace')}".strip())
    return body


class _ResponseBytes:
    """The part of a socket's interface that ``http.client`` needs to read a response."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> Any:
        return io.BytesIO(self._data)


def _request_of(action: OperatorAction) -> tuple[str, bytes | None] | None:
    """Return the path and body of an action's request; None for an action on a pod."""
    if isinstance(action, (StartAgent, UpdateAgent)):
        path = "/start" if isinstance(action, StartAgent) else "/update"
        return path, msgspec.json.encode(action.body)
    if isinstance(action, StopAgent):
        return "/stop", msgspec.json.encode(action.body)
    if isinstance(action, ShutdownAgent):
        return "/shutdown", None
    return None
