"""P4: from a shard's seal to its verified copy in another node's memory.

Rank 0 writes on one node. Rank 1, on the other node, saves only a tiny tensor and checks the received copy.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.limits import WarmMapping
from benchmarks.nodes import STREAMS, a_node_each, metric, node_settings
from benchmarks.parameters import Scene
from benchmarks.rounds import COPY, Contender, Took, byte_row, measure, use_threads
from benchmarks.sandbox import JOB
from benchmarks.states import State, build, touch, turn_over
from benchmarks.wires import Wire, raw_name
from peerstore.shard_records import CHUNK_BYTES, ShardKey
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle

OURS = "seal to 2 copies"
DELTA = "seal to 2 copies, 1 chunk in 10 changed"
DELTA_SENT = "bytes sent, 1 chunk in 10 changed"
DELTA_CHANGED = "bytes in the changed chunks"
VERIFY = "xxh3 of the bytes, 1 thread"
RAW = tuple(raw_name(streams) for streams in sorted({1, STREAMS}))
_ONE_IN = 10
_ALL_SLOTS = 4
_SETTLE_S = 60.0


class Pair:
    """The job's two nodes, from one rank's view."""

    def __init__(self, rank: int, checkpointer: Checkpointer, state: State) -> None:
        self.place: Path = checkpointer.settings.agent_directory
        self._rank = rank
        self._checkpointer = checkpointer
        self.mine = state if rank == 0 else {"beside": torch.zeros(16)}
        self._steps = 0
        self._saved: SaveHandle | None = None

    def save(self, _turn: int = 0) -> Took:
        """Save, and return the seconds from the seal to the second copy."""
        self._steps += 1
        self._saved = self._checkpointer.save(self.mine, self._steps)
        self._saved.wait()
        began = time.perf_counter()
        self._saved.wait(copies=2, domains=2)
        return Took(time.perf_counter() - began if self._rank == 0 else 0.0)

    def settle(self) -> None:
        """Wait until this node knows that the step is replicated, so that older steps can be evicted."""
        deadline = time.monotonic() + _SETTLE_S
        while not self._checkpointer.session.agent.replication_status(self._key).is_replicated:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._steps} is not replicated after {_SETTLE_S:.0f} s")
            time.sleep(0.005)

    @property
    def _key(self) -> ShardKey:
        if self._saved is None or self._saved.job is None:
            raise RuntimeError("nothing was saved")
        return self._saved.job.key

    def found(self) -> State:
        """Return the other node's copy, read as a safetensors file from that node's memory."""
        key = msgspec.structs.replace(self._key, part=0)
        store = self._checkpointer.session.agent.store
        pin = store.pin(key)  # raises if the copy is not sealed and verified
        try:
            return tensors_in(Path(f"/proc/self/fd/{pin.fd}"), pin.record.size_bytes)
        finally:
            store.unpin(pin.id)


def tensors_in(path: Path, size_bytes: int) -> State:
    """Return the tensors of the safetensors file at the start of a slot, parsed here independently."""
    kinds = {"F32": torch.float32, "U8": torch.uint8}
    found = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as data:
        header_bytes = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + header_bytes]).items():
            if name == "__metadata__" or entry["dtype"] not in kinds:
                continue
            first, last = (8 + header_bytes + at for at in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(data[first:last]), dtype=kinds[entry["dtype"]])
            found[name] = flat.reshape(entry["shape"])
    return found


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    state = build(scene.state, scene.size_bytes, rank=0, world=1)  # on both ranks: rank 1 compares
    mapping = WarmMapping(scene.folder / f"warm-{rank}", state, align=4)
    settings = node_settings(scene, rank, discovery="world", copies=2, streams=STREAMS)
    sent: list[float] = []
    touched: list[float] = []
    with contextlib.ExitStack() as undo:
        undo.enter_context(a_node_each())
        wires = {streams: Wire(rank, streams) for streams in sorted({1, STREAMS})}
        for wire in wires.values():
            undo.callback(wire.close)
        checkpointer = undo.enter_context(Checkpointer(JOB, settings=settings, on_sigterm="ignore"))
        pair = Pair(rank, checkpointer, state)
        checkpointer.restore(pair.mine)  # as a training script does; finds no step and prepares slots

        def by_wire(streams: int) -> Contender:
            def run(_turn: int) -> None:
                if rank == 0:
                    wires[streams].send(mapping.path, mapping.size_bytes)
                else:
                    wires[streams].receive([mapping.view])

            return Contender(
                raw_name(streams),
                "limit",
                run,
                (lambda: mapping.as_state(state)) if rank else None,
                before=lambda: mapping.copy_in() if rank == 0 else None,
                objects=False,
                note="sendfile to recv_into, warm to warm, acknowledged",
            )

        def change_some() -> None:
            pair.save()
            pair.settle()
            touched.append(float(touch(state, _ONE_IN * CHUNK_BYTES) * CHUNK_BYTES))

        def save_some(turn: int) -> Took:
            before = metric(pair.place, "copied_bytes_total")
            took = pair.save(turn)
            sent.append(metric(pair.place, "copied_bytes_total") - before)
            return took

        def alone(do: Callable[[], object]) -> Callable[[int], object]:
            return lambda _turn: do() if rank == 0 else None

        copied = None if rank else lambda: mapping.as_state(state)
        contenders = [
            Contender(COPY, "limit", alone(mapping.copy_in), copied, objects=False),
            Contender(VERIFY, "limit", alone(mapping.checksum), None, note="verification's read"),
            *(by_wire(streams) for streams in wires),
            Contender(
                OURS,
                "ours",
                pair.save,
                pair.found if rank else None,
                after=pair.settle,
                warm_runs=_ALL_SLOTS,
                objects=False,
                note=f"all bytes changed, verified and sealed there, {STREAMS} streams",
            ),
            Contender(
                DELTA,
                "ours",
                save_some,
                pair.found if rank else None,
                before=change_some,
                after=pair.settle,
                warm_runs=2,
                objects=False,
                note="unchanged chunks come from the previous copy and are compared",
            ),
        ]
        rows = measure(
            contenders,
            scene.rounds,
            expected=state,
            prepare=lambda _turn: turn_over(state),
            every_round=False,
            spoil=scene.spoil,
        )
    return [*rows, *_bytes_rows(rank, scene.rounds, sent, touched)]


def _bytes_rows(rank: int, rounds: int, sent: list[float], touched: list[float]) -> list[dict[str, Any]]:
    """Return the rows of the bytes that changed and of those that the writer's agent sent."""
    return [
        byte_row(DELTA_CHANGED, "limit", touched[-rounds:] if rank == 0 else [], "whole chunks of 1 MiB"),
        byte_row(DELTA_SENT, "ours", sent[-rounds:] if rank == 0 else [], "as the agent counts them"),
    ]
