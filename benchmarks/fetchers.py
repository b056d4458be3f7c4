"""Other ways to send a running job's state to a fresh rank: torchft, torch's experiments, NIXL.

Rank 0 has the state and rank 1 receives it. None of them verifies the received bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from benchmarks.nodes import STREAMS, from_all, tell
from benchmarks.parameters import Scene
from benchmarks.rounds import Contender, missing
from benchmarks.states import State, tensors

_TIMEOUT = timedelta(seconds=300)
HTTP = tuple(f"torchft HTTPTransport, {what}" for what in ("one request", f"{STREAMS} chunks"))
FT_GROUP, TORCH_GROUP, STAGER = "torchft PGTransport", "torch _pg_transport", "torch _ReplicationStager"
NIXL = {"NIXL over UCX, shared memory": "", "NIXL over UCX, TCP": "tcp,self"}
"""UCX transports by name. With none set, UCX reads the other process's memory on one machine."""


class Fetcher:
    """One way to receive the state; ``result`` is the state on the fresh rank."""

    in_place = True

    def __init__(self, rank: int, scene: Scene, state: State, target: State) -> None:
        self.rank = rank
        self.state = state
        self.target = target
        self.result: Any = target

    def before(self) -> None:
        """Prepare a transfer; not timed."""

    def fetch(self, turn: int) -> None:
        raise NotImplementedError

    def after(self) -> None:
        """Clean up after a transfer; not timed. Keep the result until it is compared."""

    def found(self) -> State:
        result, self.result = self.result, self.target if self.in_place else None
        return result

    def close(self) -> None:
        pass


class ByHttp(Fetcher):
    """torchft: an HTTP server in the healthy rank that serializes the state for each request."""

    in_place = False

    def __init__(self, *args: Any, chunks: int) -> None:
        super().__init__(*args)
        from torchft.checkpointing.http_transport import HTTPTransport

        self._transport = HTTPTransport(_TIMEOUT, num_chunks=chunks)
        self._transport._server.RequestHandlerClass.log_message = lambda *_args: None  # a line for every request
        port = urlsplit(tell(self._transport.metadata(), 0)).port
        self._address = f"http://127.0.0.1:{port}/checkpoint/"  # the machine's name may resolve to another address

    def before(self) -> None:
        self.result = None
        if self.rank == 0:  # keeps references to the tensors, copies nothing
            self._transport.disallow_checkpoint()
            self._transport.send_checkpoint([1], 1, self.state, _TIMEOUT)

    def fetch(self, turn: int) -> None:
        if self.rank == 1:
            self.result = self._transport.recv_checkpoint(0, self._address, 1, _TIMEOUT)

    def close(self) -> None:
        self._transport.shutdown()


class ByGroup(Fetcher):
    """One tensor at a time over gloo, into the existing tensors."""

    in_place = True

    def __init__(self, *args: Any, module: str) -> None:
        super().__init__(*args)
        kind = importlib.import_module(module).PGTransport
        self._steps = module.startswith("torchft")
        self._transport = kind(dist.group.WORLD, _TIMEOUT, torch.device("cpu"), lambda: self.target)

    def fetch(self, turn: int) -> None:
        if self.rank == 0 and self._steps:
            self._transport.send_checkpoint([1], turn, self.state, _TIMEOUT)
        elif self.rank == 0:
            self._transport.send_checkpoint([1], self.state)
        elif self._steps:
            self.result = self._transport.recv_checkpoint(0, "<n/a>", turn, _TIMEOUT)
        else:
            self.result = self._transport.recv_checkpoint(0)


class ByStager(Fetcher):
    """torch's stager: exchange states with a partner and store the partner's in a file.

    The fresh rank has an empty state.
    """

    in_place = False

    def __init__(self, rank: int, scene: Scene, state: State, target: State) -> None:
        super().__init__(rank, scene, state, target)
        from torch.distributed.checkpoint.staging import _ReplicationStager

        folder = tempfile.mkdtemp(prefix=f"stager-{rank}-", dir=scene.folder)
        self._stager = _ReplicationStager(dist.group.WORLD, _TIMEOUT, storage_dir=folder)
        self._folder = Path(folder)

    def before(self) -> None:
        self.result = None

    def fetch(self, turn: int) -> None:
        self.result = self._stager.stage(self.state if self.rank == 0 else {})

    def after(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()


class ByNixl(Fetcher):
    """One-sided NIXL reads, one descriptor per tensor.

    NIXL agents busy-wait, so each exists only during its own turn.
    """

    def __init__(self, *args: Any, transports: str) -> None:
        super().__init__(*args)
        with _environment("NIXL_LOG_LEVEL", "ERROR"):
            importlib.import_module("nixl_cu12._api")
        self._transports = transports
        self._agent: Any = None
        self._handle: Any = None

    def before(self) -> None:
        """Connect and register memory; not timed, because real use does it once for many transfers."""
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        with _environment("UCX_TLS", self._transports):
            self._agent = nixl_agent(f"rank-{self.rank}", nixl_agent_config(backends=["UCX"]))
        mine = [tensor for tensor in tensors(self.target if self.rank else self.state).values() if tensor.nbytes]
        regions = [(tensor.data_ptr(), tensor.nbytes, 0) for tensor in mine]
        self._registered = self._agent.register_memory([(*region, "") for region in regions], "DRAM")
        metadata = from_all((self._agent.get_agent_metadata(), regions))
        other, theirs = metadata[1 - self.rank]
        name = self._agent.add_remote_agent(other)
        if self.rank == 1:
            self._agent.make_connection(name)
            local, remote = (self._agent.get_xfer_descs(found, "DRAM") for found in (regions, theirs))
            self._handle = self._agent.initialize_xfer("READ", local, remote, name)

    def fetch(self, turn: int) -> None:
        if self.rank == 0:
            return
        state = self._agent.transfer(self._handle)
        deadline = time.monotonic() + _TIMEOUT.total_seconds()
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(0.0002)
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL did not transfer: {state}")

    def after(self) -> None:
        from_all(None)  # wait until the reader has everything
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None
        self._agent.deregister_memory(self._registered)
        self._agent = self._registered = None

    def found(self) -> State:
        return self.target


def opponents(
    rank: int, scene: Scene, state: State, target: State, undo: contextlib.ExitStack
) -> tuple[list[Contender], list[dict[str, Any]]]:
    """Return a contender for each installed package, and a row for each missing one."""
    args = (rank, scene, state, target)
    makers: dict[str, tuple[Callable[[], Fetcher], str]] = {
        HTTP[0]: (lambda: ByHttp(*args, chunks=0), "into new tensors"),
        HTTP[1]: (lambda: ByHttp(*args, chunks=STREAMS), "into new tensors"),
        FT_GROUP: (lambda: ByGroup(*args, module="torchft.checkpointing.pg_transport"), "gloo, in place"),
        TORCH_GROUP: (lambda: ByGroup(*args, module="torch.distributed.checkpoint._pg_transport"), "gloo, in place"),
        STAGER: (lambda: ByStager(*args), "gloo, into new tensors and a file on tmpfs"),
    }
    for name, transports in NIXL.items():
        note = "tensors registered and connections made beforehand"
        makers[name] = (lambda transports=transports: ByNixl(*args, transports=transports), note)
    there: list[Contender] = []
    absent: list[dict[str, Any]] = []
    for name, (make, note) in makers.items():
        try:
            one = make()
        except ImportError as error:
            absent.append(missing(name, f"cannot be imported here: {error}"))
            continue
        undo.callback(one.close)
        there.append(
            Contender(
                name,
                "opponent",
                one.fetch,
                one.found if rank else None,
                before=one.before,
                after=one.after,
                objects=not isinstance(one, ByNixl),
                note=note,
            )
        )
    return there, absent


@contextlib.contextmanager
def _environment(name: str, value: str):
    before = os.environ.get(name)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
