"""AWS's own client on the memory service, compared with the server that AWS tests its library with.

    python -m benchmarks.memory_service --output benchmarks/results/DATE-memory-service.json

One client puts a shard and gets it back, alternating between two servers on this machine, each in its own process.
AWS's server keeps bodies in a dictionary. Ours is a node agent, which computes checksums and stores bodies in its
arena. The benchmark compares the returned bytes. ``wire`` is the same without the client's checksums and copies: put
and get up to the last received byte.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from tests.support.memory_nodes import memory_nodes
from tests.support.memory_servers import aws_server

RANK, STEPS = 0, 3


def client_of(address: str, namespace: str) -> Any:
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient

    config = InMemoryClientConfig(base_url=f"http://{address}")
    client = InMemoryCheckpointClient(namespace, str(RANK), "1", config=config, metadata_file_count=0)
    client.get_or_create_namespace()
    return client


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def by_client(client: Any, step: int, body: bytes) -> dict[str, float]:
    put_s, _ = timed(lambda: client.put_checkpoint(step=step, data=body))
    get_s, found = timed(lambda: client.get_checkpoint(step=step))
    assert found == body, "the returned bytes differ from the bytes that were put"
    return {"put_s": put_s, "get_s": get_s}


def by_wire(address: str, namespace: str, step: int, body: bytes) -> dict[str, float]:
    into = memoryview(bytearray(len(body)))
    path = f"/v1/cp/checkpoints/{namespace}/{RANK}/{step}"
    with contextlib.closing(http.client.HTTPConnection(address, timeout=120)) as connection:
        connection.connect()

        def put() -> None:
            connection.request("POST", path, memoryview(body))
            assert connection.getresponse().read() == b'{"status":"ok"}'

        def get() -> None:
            connection.request("GET", path)
            answer, count = connection.getresponse(), 0
            while got := answer.readinto(into[count:]):
                count += got
            assert count == len(body)

        put_s, _ = timed(put)
        get_s, _ = timed(get)
    assert into == body, "the returned bytes differ from the bytes that were put"
    return {"put_s": put_s, "get_s": get_s}


def measure(mib: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, dict[str, list[dict[str, float]]]] = {
        way: {"theirs": [], "ours": []} for way in ("client", "wire")
    }
    with aws_server() as their_address, memory_nodes("n1", memory_service_auth="off", budget="2GiB") as nodes:
        addresses = {"theirs": their_address, "ours": nodes["n1"].address}
        clients = {name: client_of(address, "bench") for name, address in addresses.items()}
        for turn in range(rounds + STEPS):  # the first STEPS turns warm up
            body = os.urandom(mib << 20)
            for name in sorted(addresses, reverse=bool(turn % 2)):
                found = by_client(clients[name], 2 * turn, body)
                raw = by_wire(addresses[name], "bench", 2 * turn + 1, body)
                if turn >= STEPS:
                    seconds["client"][name].append(found)
                    seconds["wire"][name].append(raw)
        for client in clients.values():
            client.close()
    return {"mib": mib, "rounds": rounds, "ways": {way: summed(found, mib) for way, found in seconds.items()}}


def summed(found: dict[str, list[dict[str, float]]], mib: int) -> dict[str, Any]:
    """Return medians, and the median speed-up over AWS's server within each round."""
    result: dict[str, Any] = {}
    for what in ("put_s", "get_s"):
        pairs = list(zip(found["theirs"], found["ours"], strict=True))
        result[what] = {
            **{name: statistics.median(one[what] for one in rounds) for name, rounds in found.items()},
            "ours_mib_per_s": mib / statistics.median(one[what] for one in found["ours"]),
            "times_as_fast": statistics.median(one[what] / other[what] for one, other in pairs),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = {"machine": facts(), "sizes": [measure(mib, args.rounds) for mib in args.mib]}
    text = json.dumps(report, indent=1)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
