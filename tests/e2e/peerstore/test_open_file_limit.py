"""An agent raises its limit of open files, and refuses new work before it reaches the limit."""

import contextlib
import resource
from pathlib import Path

import pytest

from peerstore.errors import AgentBusyError
from tests.support.local_nodes import wait_until
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_agent, store_directory

HARD = 200


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, HARD))


@pytest.fixture
def agent():
    with store_directory() as directory, store_agent(directory, "--budget", "64MiB", preexec_fn=few_files) as agent:
        assert agent.wait_ready()
        yield agent


def files_of(agent):
    return len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))


def test_agent_raises_its_open_file_limit(agent):
    limits = Path(f"/proc/{agent.process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(HARD), str(HARD)]


def test_new_work_is_refused_and_started_work_finishes(agent):
    with agent.client() as client, contextlib.ExitStack() as crowd:
        save_shard(client, shard_key(1))
        begun = client.lease(shard_key(2), MIB, 1)
        while files_of(agent) < HARD - 30:
            crowd.enter_context(agent.client()).epoch("job")  # the response shows that the agent has accepted
        with pytest.raises(AgentBusyError, match="Ask again"):
            client.lease(shard_key(3), MIB, 1)
        with pytest.raises(AgentBusyError):
            client.pin(shard_key(1))
        client.seal(begun.id, MIB)
        assert client.verify(shard_key(1)) == ()
        crowd.close()
        wait_until(lambda: files_of(agent) < HARD // 2, "the agent has closed the crowd's connections")
        assert load_shard(client, shard_key(1)) == shard_content(shard_key(1), MIB)
        save_shard(client, shard_key(3))
        status = client.status()
        assert (status.counters["rejected_busy"], status.counters["files_limit"]) == (2, HARD)
        assert status.damage_reports == ()


def test_repeated_restarts_keep_files_and_threads_constant():
    """Every agent adopts the killed agent's slots without leaking files."""
    seen = []
    with store_directory() as directory:
        for version in range(6):
            with store_agent(directory, "--budget", "64MiB") as agent:
                assert agent.wait_ready()
                with agent.client() as client:
                    save_shard(client, shard_key(version))
                    client.versions.mark_committed("job", shard_key(version).version_id)
                    assert load_shard(client, shard_key(version)) == shard_content(shard_key(version), MIB)
                    seen.append((files_of(agent), len(list(Path(f"/proc/{agent.process.pid}/task").iterdir()))))
                agent.kill()
    assert max(files for files, _ in seen[1:]) <= seen[0][0] + 1
    assert max(threads for _, threads in seen[1:]) <= seen[0][1] + 1
