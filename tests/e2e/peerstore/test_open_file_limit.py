"""An agent and its limit of open files: raised at the start, and never met in the middle of something."""

import contextlib
import resource
from pathlib import Path

import pytest

from peerstore.errors import AgentBusyError
from tests.support.local_nodes import until
from tests.support.stores import MIB, content, key, load, save, store_agent, store_directory

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
        save(client, key(1))
        begun = client.lease(key(2), MIB, 1)
        while files_of(agent) < HARD - 30:
            crowd.enter_context(agent.client()).epoch("job")  # answered: the agent has taken this connection
        with pytest.raises(AgentBusyError, match="Ask again"):
            client.lease(key(3), MIB, 1)
        with pytest.raises(AgentBusyError):
            client.pin(key(1))
        client.seal(begun.id, MIB)
        assert client.verify(key(1)) == ()
        crowd.close()
        until(lambda: files_of(agent) < HARD // 2, "the crowd to be gone")
        assert load(client, key(1)) == content(key(1), MIB)
        save(client, key(3))
        status = client.status()
        assert (status.counters["rejected_busy"], status.counters["files_limit"]) == (2, HARD)
        assert status.damage_reports == ()


def test_repeated_restarts_keep_files_and_threads_constant():
    """What a killed agent left is adopted each time; nothing of it stays open."""
    seen = []
    with store_directory() as directory:
        for version in range(6):
            with store_agent(directory, "--budget", "64MiB") as agent:
                assert agent.wait_ready()
                with agent.client() as client:
                    save(client, key(version))
                    client.mark_committed("job", key(version).version_id)
                    assert load(client, key(version)) == content(key(version), MIB)
                    seen.append((files_of(agent), len(list(Path(f"/proc/{agent.process.pid}/task").iterdir()))))
                agent.kill()
    assert max(files for files, _ in seen[1:]) <= seen[0][0] + 1
    assert max(threads for _, threads in seen[1:]) <= seen[0][1] + 1
