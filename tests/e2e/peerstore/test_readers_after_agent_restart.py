"""A reader of a pinned shard is safe from the agent's death and from its successor's writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from peerstore.errors import PeerStoreError
from tests.support.local_nodes import wait_until
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_agent, store_directory

BUDGET = ("--budget", "64MiB")
SIZE = 4 * MIB

READER = """
import sys
from peerstore.client.store_client import Client
from peerstore.transport.unix import connect_to_agent
from peerstore.store.arena import FileMapping
from peerstore.settings import AgentPaths
from pathlib import Path
from tests.support.stores import shard_content, shard_key

of = shard_key(int(sys.argv[2]))
client = Client(lambda: connect_to_agent(AgentPaths(Path(sys.argv[1])).socket), job="reader")
pin = client.pin(of)
if "cut off" in sys.argv:
    client.close()
expected = shard_content(of, pin.record.size_bytes)
half = len(expected) // 2
with FileMapping(pin.fd, len(expected)) as mapping, mapping.view as view:
    assert bytes(view[:half]) == expected[:half]
    print("half", flush=True)
    sys.stdin.readline()
    right = bytes(view[half:]) == expected[half:]
held = "cut off" not in sys.argv and client.unpin(pin.id)
print("right" if right else "wrong", "held" if held else "lost", flush=True)
client.close()
"""


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place


class Reader:
    """A process that has read half of a shard."""

    def __init__(self, directory, version, *how):
        command = [sys.executable, "-c", READER, str(directory), str(version), *how]
        root = Path(__file__).resolve().parents[3]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self.process.stdout.readline() == "half\n"

    def finish(self):
        """Return the reader's report, or its exit status if a signal ended it."""
        said, _ = self.process.communicate("go on\n", timeout=200)
        return said.strip() if self.process.returncode == 0 else f"exit {self.process.returncode}"


@pytest.mark.parametrize("size", [MIB, SIZE, SIZE + MIB], ids=["smaller", "as large", "larger"])
def test_restarted_agent_never_overwrites_data_of_an_active_reader(directory, size):
    """The successor writes every slot that it could reuse, several times."""
    with store_agent(directory, *BUDGET) as agent:
        with agent.client(retry_s=20) as client:
            for version in (1, 2):
                save_shard(client, shard_key(version), SIZE)
        readers = [Reader(directory, version) for version in (1, 2)]
        agent.kill()
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        for version in range(3, 9):
            save_shard(client, shard_key(version), size)
            assert load_shard(client, shard_key(version)) == shard_content(shard_key(version), size)
        assert [reader.finish() for reader in readers] == ["right lost"] * 2
        assert client.status().arena.allocated_bytes <= 64 * MIB


def test_memory_of_a_reader_counts_until_it_ends(directory):
    """An evicted slot under a reader still counts, so its memory is not leased again."""
    with store_agent(directory, "--budget", "12MiB") as agent:
        with agent.client(retry_s=20) as client:
            save_shard(client, shard_key(1), SIZE)
        reader = Reader(directory, 1)
        agent.kill()
    with store_agent(directory, "--budget", "12MiB") as agent, agent.client(retry_s=20) as client:
        client.versions.delete("job", [shard_key(1).version_id])
        assert client.list_shards("job") == []
        assert client.status().arena.allocated_bytes == SIZE
        with pytest.raises(PeerStoreError):
            client.lease(shard_key(2), 3 * SIZE, 1)
        assert reader.finish() == "right lost"
        assert client.status().arena.allocated_bytes == 0
        client.lease(shard_key(2), 3 * SIZE, 1)


def test_live_reader_with_a_lost_pin_keeps_its_data(directory):
    """The reader's connection is lost for longer than the grace time, but the process still reads."""
    with (
        store_agent(directory, *BUDGET, "--lease-grace-s", "0.1") as agent,
        agent.client(retry_s=20) as client,
    ):
        save_shard(client, shard_key(1), SIZE)
        reader = Reader(directory, 1, "cut off")
        wait_until(lambda: client.status().arena.pins == 0, "the agent has released the pin")
        for version in range(2, 6):
            save_shard(client, shard_key(version), SIZE)
        assert shard_key(1) not in {fact.key for fact in client.list_shards("job")}
        assert reader.finish() == "right lost"
