"""P14: time from no process group to the first all-reduce, with one store or a spread store.

Everything is on one machine. Each server is a process, as under ``elastic run``. Every rank reconnects in each turn, as
it does after a fault. The time does not include leaving the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parameters import Scene
from benchmarks.rounds import Kind
from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.workers.native_connections import close_store_connections
from tests.support.store_servers import server_processes
from tests.support.zygote import Zygote

OURS, ONE = "spread over the nodes", "one TCPStore"
LAZY = "{}, TORCH_GLOO_LAZY_INIT=1"
_KINDS: dict[str, Kind] = {OURS: "ours", ONE: "opponent"}
_RANKS_A_NODE = 8
_ELEMENTS = 1024
_PATIENCE = timedelta(minutes=5)


def nodes_of(ranks: int) -> int:
    """Return the number of nodes that store keys: at least two, even if one node has all ranks."""
    return max(2, -(-ranks // _RANKS_A_NODE))


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    """Form a group of ``scene.ranks`` ranks, alternating between the two stores."""
    zygote = Zygote()
    try:
        rows = _meet(zygote, scene, "{}", {})
        return rows + _meet(zygote, scene, LAZY, {"TORCH_GLOO_LAZY_INIT": "1"})
    finally:
        zygote.close()


def _meet(zygote: Zygote, scene: Scene, names: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    turns = _turns(scene.rounds)
    with server_processes(zygote, 1 + nodes_of(scene.ranks)) as servers:
        beside, *spread = [server.address for server in servers]
        args = (beside, spread, scene.ranks, turns, [name for name in _KINDS if names.format(name) in scene.spoil])
        running = [zygote.start(_rank, rank, *args, environ=environ) for rank in range(scene.ranks)]
        try:
            said = [one.wait(600.0).result for one in running]
        finally:
            for one in running:
                one.kill_if_alive()
    return [_row(name, names.format(name), turns, said, nodes_of(scene.ranks)) for name in _KINDS]


def _turns(rounds: int) -> list[str]:
    """Return the order of stores: one warm-up each, then rounds in alternating order."""
    names = list(_KINDS)
    return names + [name for number in range(rounds) for name in (names if number % 2 else names[::-1])]


def _row(name: str, shown: str, turns: Sequence[str], said: Sequence[Any], nodes: int) -> dict[str, Any]:
    """Return the row of one store; a turn takes as long as its slowest rank."""
    mine = [number for number, turn in enumerate(turns) if turn == name]
    slowest = [max(one[number][0] for one in said) for number in mine]
    return {
        "name": shown,
        "kind": _KINDS[name],
        "unit": "s",
        "first": slowest[0],
        "samples": slowest[1:],
        "equal": all(one[number][1] for one in said for number in mine),
        "compared": True,
        "note": f"{nodes} servers" if name == OURS else "1 server",
    }


def _rank(
    say: Callable[[str], object],
    rank: int,
    beside: str,
    spread: list[str],
    ranks: int,
    turns: list[str],
    spoil: list[str],
) -> list[tuple[float, bool]]:
    torch.set_num_threads(1)
    together = _client(beside)
    found = []
    for number, name in enumerate(turns):
        together.barrier(f"turn {number}", ranks, _PATIENCE)
        began = time.perf_counter()
        store = (
            RootlessStore(spread, close_connections=close_store_connections, timeout=_PATIENCE)
            if name == OURS
            else _client(spread[0])
        )
        prefix = dist.PrefixStore(f"elastic/{number}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=ranks, timeout=_PATIENCE)
        value = _value(rank)
        dist.all_reduce(value)
        took = time.perf_counter() - began
        expected = sum((_value(other) for other in range(ranks)), torch.zeros(_ELEMENTS))
        if name in spoil:
            value[0] += 1
        found.append((took, value.numpy().tobytes() == expected.numpy().tobytes()))
        together.barrier(f"met {number}", ranks, _PATIENCE)
        dist.destroy_process_group()
        if isinstance(store, RootlessStore):
            store.close()
    return found


def _client(address: str) -> Any:
    host, port = address.rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_PATIENCE)


def _value(rank: int) -> torch.Tensor:
    """Return whole numbers, whose sum does not depend on the order."""
    return torch.randint(0, 1000, (_ELEMENTS,), generator=torch.Generator().manual_seed(rank)).float()
