"""A node agent's process: found or started, shared, refused, ended."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from peerstore.cli import EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from peerstore.client.agent_launcher import connect_or_launch_agent
from peerstore.client.store_client import Client
from peerstore.errors import AgentUnreachableError, ArenaBusyError, ArenaFullError, RequestError, UnavailableError
from peerstore.settings import AgentPaths
from peerstore.store.arena import FileMapping, closing_fd, prefault_address
from tests.support.agents import agent_pid, stop_agent, wait_process_ended
from tests.support.local_nodes import wait_until
from tests.support.stores import (
    MIB,
    load_shard,
    open_client,
    save_shard,
    shard_content,
    shard_key,
    store_agent,
    store_directory,
    write_slot,
)

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place
        stop_agent(place)


@pytest.fixture
def enough():
    """A stack of contexts that close when the test ends."""
    with contextlib.ExitStack() as stack:
        yield stack


def serve_command(directory, *options):
    return [sys.executable, "-m", "peerstore.cli", "serve", "--dir", str(directory), "--budget", "64MiB", *options]


def here():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


STARTER = """
import os, sys
from pathlib import Path
from peerstore.client.store_client import Client
from peerstore.client.agent_launcher import connect_or_launch_agent
from peerstore.settings import AgentPaths

place, command = AgentPaths(Path(sys.argv[1])), sys.argv[2:]
sys.stdin.readline()  # all at the same instant
client = Client(lambda: connect_or_launch_agent(place, command), job="job")
print(client.arena_id, flush=True)
sys.stdin.readline()  # all are connected now
client.close()
"""


def starter(directory, command):
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(directory), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=here(),
        text=True,
    )


def say(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_eight_concurrent_starters_share_an_agent_that_outlives_them(directory, enough):
    command = serve_command(directory, "--detach", "--linger-s", "0", "--job-ttl-s", "0")
    starters = [enough.enter_context(starter(directory, command)) for _ in range(8)]
    for one in starters:
        say(one)
    arenas = {one.stdout.readline() for one in starters}
    assert len(arenas) == 1
    assert arenas != {""}
    pid = agent_pid(directory)
    assert pid not in {None, *(one.pid for one in starters)}
    log = directory / "agent.log"
    wait_until(lambda: " serves " in log.read_text(), "the agent has logged that it serves")
    with open_client(directory / "agent.sock", job="job") as client:
        for one in starters:
            say(one)
            assert one.wait(20) == 0
        while client.status().jobs[0].clients > 1:
            pass  # the agent notices one exit after the other
        save_shard(client, shard_key())
        assert load_shard(client, shard_key()) == shard_content(shard_key(), MIB)
    wait_process_ended(pid)  # no client is connected, and the job has expired
    assert log.read_text().count(" serves ") == 1
    assert sorted(path.name for path in directory.iterdir()) == ["agent.lock", "agent.log", "launch.lock", "notes"]
    assert [path.name for path in (directory / "notes").iterdir()] == ["expired.job"]


def test_agent_stops_after_its_last_writer_dies(directory):
    writer = """
import os, signal, sys
from pathlib import Path
from peerstore.client.store_client import Client
from peerstore.transport.unix import connect_to_agent
from peerstore.shard_records import ShardKey
client = Client(lambda: connect_to_agent(Path(sys.argv[1])), job="job", retry_s=20)
client.lease(ShardKey("job", 1, 1, "a", 0, 0), 1 << 20, 1)
print("has a slot", flush=True)
signal.pause()
"""
    with store_agent(directory, "--budget", "64MiB", "--linger-s", "0", "--job-ttl-s", "0") as agent:
        command = [sys.executable, "-c", writer, str(agent.place.socket)]
        with subprocess.Popen(command, env=here(), stdout=subprocess.PIPE) as one:
            with agent.client(retry_s=30):  # keeps the agent alive until the writer has connected
                said = one.stdout.readline()
            one.kill()
        assert said == b"has a slot\n"
        assert agent.process.wait(20) == EXIT_OK
    assert not (directory / "slots").exists()


def test_failed_agent_start_reports_the_reason(directory):
    command = [*serve_command(directory, "--detach"), "--budget", "nonsense"]
    with pytest.raises(AgentUnreachableError, match="budget 'nonsense' is not a size"):
        connect_or_launch_agent(AgentPaths(directory), command)


def test_a_directory_prepared_by_others_is_refused(directory):
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    with pytest.raises(RequestError, match=r"must be a directory of user .* no other user can write to"):
        connect_or_launch_agent(AgentPaths(directory), serve_command(directory, "--detach"))
    directory.rmdir()
    directory.symlink_to("/tmp")
    try:
        with pytest.raises(RequestError, match="must be a directory"):
            connect_or_launch_agent(AgentPaths(directory), serve_command(directory, "--detach"))
    finally:
        directory.unlink()


def test_agent_files_and_socket_are_private_to_the_user(directory):
    with store_agent(directory, "--budget", "64MiB") as agent:
        assert agent.wait_ready()
        assert stat.S_IMODE(agent.place.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(agent.place.lock.stat().st_mode) == 0o600
        assert agent.end() == EXIT_OK
    assert not agent.place.socket.exists()


def test_second_agent_in_a_directory_is_refused(directory):
    with store_agent(directory, "--budget", "64MiB") as agent:
        assert agent.wait_ready()
        second = subprocess.run(serve_command(directory), capture_output=True, text=True, env=here())
        assert second.returncode == EXIT_FAILED
        assert second.stderr.startswith(f"peerstore: another agent already serves {directory}")
        with agent.client() as client:
            save_shard(client, shard_key())


def test_agent_replaces_its_deleted_socket(directory):
    place = AgentPaths(directory)
    with store_agent(directory, "--budget", "64MiB") as agent:
        assert agent.wait_ready()
        with agent.client() as client:
            save_shard(client, shard_key())
        place.socket.unlink()
        launch = partial(connect_or_launch_agent, place, serve_command(directory, "--detach"))
        with contextlib.closing(Client(launch, job="job")) as client:
            assert load_shard(client, shard_key()) == shard_content(shard_key(), MIB)
        assert agent_pid(directory) == agent.process.pid
        assert stat.S_IMODE(place.socket.stat().st_mode) == 0o600
        assert agent.end() == EXIT_OK
    assert not place.socket.exists()


def test_agent_restores_its_deleted_lock_file(directory):
    with store_agent(directory, "--budget", "64MiB") as agent:
        assert agent.wait_ready()
        agent.place.lock.unlink()
        wait_until(lambda: agent_pid(directory) == agent.process.pid, "the lock file names the agent again")
        assert stat.S_IMODE(agent.place.lock.stat().st_mode) == 0o600
        second = subprocess.run(serve_command(directory), capture_output=True, text=True, env=here())
        assert second.stderr.startswith(f"peerstore: another agent already serves {directory}")


def test_agent_exits_when_its_directory_is_deleted(directory):
    with store_agent(directory, "--budget", "64MiB") as agent:
        assert agent.wait_ready()
        with agent.client() as client:
            save_shard(client, shard_key())
        shutil.rmtree(directory)
        assert agent.process.wait(60) == EXIT_OK
    assert not directory.exists()


def test_agent_exits_when_another_agent_serves_its_directory(directory):
    with store_agent(directory, "--budget", "64MiB") as first:
        assert first.wait_ready()
        os.kill(first.process.pid, signal.SIGSTOP)
        shutil.rmtree(directory)
        with store_agent(directory, "--budget", "64MiB") as second:
            assert second.wait_ready()
            with second.client() as client:
                save_shard(client, shard_key())
            os.kill(first.process.pid, signal.SIGCONT)
            assert first.process.wait(60) == EXIT_OK
            assert agent_pid(directory) == second.process.pid
            with second.client() as client:
                assert load_shard(client, shard_key()) == shard_content(shard_key(), MIB)


def test_the_agent_imports_nothing_heavy(directory):
    program = (
        "import sys, threading, os, signal, runpy\n"
        "from peerstore.cli import main\n"
        "threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
        "status = main(sys.argv[1:])\n"
        "print(status, sorted({'torch', 'numpy', 'boto3', 'obstore', 'fsspec', 'tieredckpt'} & sys.modules.keys()))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *serve_command(directory)[3:]], capture_output=True, text=True, env=here()
    )
    assert ran.stdout == "0 []\n", ran.stderr


def test_sigterm_ends_waiting_requests_and_keeps_sealed_shards(directory):
    with store_agent(directory, "--budget", "64MiB") as agent, agent.client(retry_s=20) as client:
        save_shard(client, shard_key(1))
        client.lease(shard_key(job="other"), 60 * MIB, 1)
        answers = []

        def wait_long():
            with agent.client(retry_s=0) as waiting:
                try:
                    waiting.lease(shard_key(2), 50 * MIB, 1, wait_s=250)
                except UnavailableError as error:
                    answers.append(error)

        waiting = threading.Thread(target=wait_long)
        waiting.start()
        while client.status().counters.get("lease_waits", 0) == 0:
            pass
        assert agent.end() == EXIT_OK
        waiting.join(20)
        assert len(answers) == 1
    with store_agent(directory, "--budget", "64MiB") as agent, agent.client(retry_s=20) as client:
        assert load_shard(client, shard_key(1)) == shard_content(shard_key(1), MIB)


def status_of(directory, *options):
    return subprocess.run(
        [sys.executable, "-m", "peerstore.cli", "status", "--dir", str(directory), *options],
        capture_output=True,
        text=True,
        env=here(),
    )


def test_status_for_people_and_for_programs(directory):
    with store_agent(directory, "--budget", "64MiB") as agent, agent.client(retry_s=20, job="job") as client:
        for version in (1, 2):
            save_shard(client, shard_key(version))
        client.report_damage(shard_key(2), "a test says so")
        said = status_of(directory)
        assert said.returncode == EXIT_OK
        assert said.stderr == ""
        assert said.stdout.splitlines() == [
            "arena   1.0 MiB sealed, 2.0 MiB in 2 slots (1 free, 0 being written), budget 64.0 MiB",
            "job     job: newest whole version 1, 1 versions, epoch 1, 1 processes",
            "damage  job/2 part 0 (epoch 1 a): a test says so",
        ]
        told = json.loads(status_of(directory, "--json").stdout)
        assert told["arena"]["budget_bytes"] == 64 * MIB
        assert told["jobs"][0] == {
            "job": "job",
            "epoch": 1,
            "clients": 1,
            "versions": 1,
            "newest_committed": 1,
            "newest_replicated": None,
            "expires_in_s": None,
        }
        assert told["counters"]["sealed"] == 2


def test_status_without_an_agent(directory):
    said = status_of(directory)
    assert said.returncode == EXIT_UNREACHABLE
    assert said.stderr.startswith(f"peerstore: no agent answers on {directory}/agent.sock")
    assert said.stdout == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "lots"], "budget 'lots' is not a size"),
        (["--budget", "0"], "keeps nothing"),
        (["--budget", "101%"], "at most 100%"),
        (["--slots-per-part", "0"], "a writer needs at least one slot"),
        (["--job-ttl-s", "nan"], "job_ttl_s=nan"),
        (["--lease-grace-s", "-1"], "lease_grace_s=-1"),
    ],
)
def test_invalid_options_are_refused_and_nothing_starts(directory, options, said):
    ran = subprocess.run([*serve_command(directory), *options], capture_output=True, text=True, env=here())
    assert ran.returncode == EXIT_USAGE
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not directory.exists()


INTRUDER = """
import os, sys
from pathlib import Path
from peerstore.client.store_client import Client
from peerstore.transport.unix import connect_to_agent
from peerstore.errors import PeerStoreError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    Client(lambda: connect_to_agent(Path(sys.argv[1])), retry_s=0)
except PeerStoreError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.system
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(directory):
    """The directory's mode refuses other users; the socket's peer credentials do so, too."""
    with store_agent(directory, "--budget", "64MiB") as agent:
        assert agent.wait_ready()

        def intrude():
            ran = subprocess.run(
                [sys.executable, "-c", INTRUDER, str(agent.place.socket)], capture_output=True, text=True, env=here()
            )
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        assert intrude().startswith("AgentUnreachableError")
        directory.chmod(0o755)
        agent.place.socket.chmod(0o666)
        assert "user 65534 may not use the agent of user 0" in intrude()
        with agent.client() as client:
            assert client.status().jobs == ()


@pytest.fixture
def small_tmpfs(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system of its own size")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "none", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill_up(place):
    """Return a file that occupies all free space."""
    path = place / "somebody else"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(fd, bytes(1 << 12)):
            pass
    os.close(fd)
    assert os.statvfs(place).f_bavail == 0
    return path


@pytest.mark.system
class TestSmallTmpfs:
    """A file system smaller than the budget: errors, never SIGBUS."""

    def test_slot_larger_than_the_file_system_is_refused_with_advice(self, small_tmpfs):
        with store_agent(small_tmpfs / "a", "--budget", "1GiB") as agent, agent.client(retry_s=20) as client:
            lease = client.lease(shard_key(1), 6 * MIB, 1)
            write_slot(lease, shard_content(shard_key(1), 6 * MIB))
            for attempt in (
                lambda: client.lease(shard_key(1, job="other"), 12 * MIB, 1),
                lambda: client.grow(lease.id, 20 * MIB),
            ):
                with pytest.raises(ArenaFullError, match=r"does not fit into .* Enlarge it"):
                    attempt()
            client.seal(lease.id, 6 * MIB)
            assert load_shard(client, shard_key(1)) == shard_content(shard_key(1), 6 * MIB)
            assert agent.end() == EXIT_OK

    def test_missing_memory_is_detected_when_prefaulting(self, small_tmpfs):
        with store_agent(small_tmpfs / "a", "--budget", "1GiB") as agent, agent.client(retry_s=20) as client:
            lease = client.lease(shard_key(1), 10 * MIB, 1)
            (small_tmpfs / "somebody else").write_bytes(bytes(10 * MIB))
            refused = pytest.raises(ArenaFullError, match=r"no memory for 10\.0 MiB of the arena")
            with closing_fd(client.open_slot(lease.slot)) as fd:
                mapped = FileMapping(fd, 10 * MIB, writable=True)
            with mapped as mapping, refused:
                prefault_address(mapping.address, 10 * MIB)
            client.release(lease.id)
            (small_tmpfs / "somebody else").unlink()
            save_shard(client, shard_key(2), 10 * MIB)
            assert load_shard(client, shard_key(2)) == shard_content(shard_key(2), 10 * MIB)

    def test_hashing_a_slot_with_holes_does_not_kill_the_agent(self, small_tmpfs):
        with store_agent(small_tmpfs / "a", "--budget", "1GiB") as agent, agent.client(retry_s=20) as client:
            lease = client.lease(shard_key(1), 10 * MIB, 1)
            blocks = fill_up(small_tmpfs)
            with pytest.raises(ArenaFullError):
                client.seal(lease.id, 10 * MIB, b"m" * MIB)
            blocks.unlink()
            client.seal(lease.id, 10 * MIB)
            assert load_shard(client, shard_key(1)) == bytes(10 * MIB)

    def test_reserved_slots_stop_where_the_memory_ends(self, small_tmpfs):
        with store_agent(small_tmpfs / "a", "--budget", "1GiB") as agent, agent.client(retry_s=20) as client:
            assert len(client.reserve("job", 0, 10 * MIB)) == 1
            with pytest.raises((ArenaFullError, ArenaBusyError)):
                client.lease(shard_key(1, job="other"), 10 * MIB, 1)
            save_shard(client, shard_key(1), 10 * MIB)
