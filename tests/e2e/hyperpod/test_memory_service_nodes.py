"""Nodes of the memory service that are damaged, or that miss requests while they are down."""

from __future__ import annotations

import os

from tests.support.memory_nodes import memory_nodes
from tests.support.memory_servers import request

NAMESPACE = "/v1/cp/namespaces/a"
SHARD = "/v1/cp/checkpoints/a/0/5"


def test_damaged_and_absent_shards_are_distinguished() -> None:
    """A damaged shard is read from the other node; deleted data does not return with an absent node."""
    body = os.urandom(20_000_000)
    with memory_nodes("n1", "n2", memory_service_auth="off") as nodes:
        n1, n2 = nodes["n1"], nodes["n2"]
        assert request(n1.address, "POST", f"{NAMESPACE}?num_ranks=1").status == 200
        assert request(n1.address, "POST", SHARD, body, {"Shard-Meta": "{}"}).status == 200
        n2.wait_shards(1)
        (slot,) = (n1.directory / "slots").iterdir()
        with slot.open("r+b") as file:
            file.seek(15_000_000)
            file.write(b"changed")
        answer = request(n1.address, "GET", SHARD)
        assert (answer.status, answer.body, answer.headers["shard-meta"]) == (200, body, "{}")
        n1.wait_shards(1)  # n1 fetched the shard again

        n2.kill_agent()
        assert request(n1.address, "DELETE", NAMESPACE).status == 200
        assert request(n1.address, "POST", f"{NAMESPACE}?num_ranks=3&steps_retained=7").status == 200
        assert request(n1.address, "POST", SHARD, b"of another life").status == 200
        n2.start()
        n2.wait_shards(1)
        assert request(n2.address, "GET", NAMESPACE).json == {"num_ranks": 3, "steps_to_retain_per_rank": 7}
        assert request(n2.address, "GET", SHARD).body == b"of another life"
