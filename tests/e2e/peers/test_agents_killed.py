"""After SIGKILL of an agent at any point of replication, committed shards remain and get new replicas."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from peerstore.errors import PeerStoreError
from peerstore.failpoints import FAILPOINTS
from peerstore.membership.topology import PeerNode, validate_node_id
from peerstore.replication.replica_placement import place_replicas
from tests.support.agent_jobs import SIZE, agent_job
from tests.support.local_nodes import wait_until
from tests.support.stores import MIB, flip_byte, shard_content

pytestmark = pytest.mark.e2e

SAVING = {
    "peer.offered": 1,
    "peer.sending": 3,
    "peer.receiving": 3,
    "replica.sealing": 1,
    "replica.sealed": 1,
    "replica.committed": 1,
    "peer.replicated": 1,
}
"""Each point of a replication, and the number of the pass that kills the agent."""
LOST = ("peer.sending", "peer.receiving", "peer.replicated")
OTHERS = ("peer.repairing", "peer.reading")
NAMES = ("n1", "n2", "n3")
LARGE = 32 * MIB + 5


def test_every_crash_point_between_agents_has_a_case():
    assert {point for point in FAILPOINTS if point.startswith(("peer.", "replica."))} == {*SAVING, *OTHERS}


@pytest.fixture
def job():
    """Start three agents that have replicated version 1."""
    with agent_job(*NAMES) as made:
        made.save(1)
        made.wait_replicated(1)
        yield made


def start_with_crash_point(job, name, point, count=1):
    """Restart the agent with its arena and a crash point."""
    job[name].kill_agent()
    job[name].start(crash_at=f"{point}:{count}")


def kill_while_saving(job, point):
    """Save version 2 and kill n1, which sends, receives and leads, at this point."""
    start_with_crash_point(job, "n1", point, SAVING[point])
    wait_until(lambda: job.alive_nodes("n2") == job.alive_nodes("n3") == set(NAMES), "all nodes see each other")
    job.save(2)
    job["n1"].wait_agent_ended()


def expect_newest(job, names):
    """Check that the newest committed version of these nodes is fully replicated."""

    def newest():
        return max(job.newest_replicated(name) for name in names)

    def protected():
        version = newest()
        return version if all(len(job.holders(of)) >= 2 for of in job.shard_keys(version)) else 0

    version = wait_until(protected, "the newest committed version is fully replicated")
    try:
        expect_all(job, job.shard_keys(version))
    except (AssertionError, PeerStoreError, StopIteration):
        if (newer := newest()) == version:
            raise
        expect_all(job, job.shard_keys(newer))


def expect_all(job, keys):
    job.assert_copies(keys)
    for of in keys:
        data, pulled = job.read(of, job.holders(of))
        assert data == shard_content(of, SIZE)
        assert pulled.failed == {}


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=pytest.mark.nightly if point in LOST else []) for point in SAVING]
)
def test_agent_restarted_with_its_arena_keeps_its_shards(job, point):
    kill_while_saving(job, point)
    job["n1"].start()
    expect_newest(job, NAMES)
    job.save(3)
    job.wait_replicated(3)
    job.assert_copies(job.shard_keys(3))


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in LOST else pytest.mark.nightly) for point in SAVING]
)
def test_job_survives_a_permanently_lost_agent(job, point):
    kill_while_saving(job, point)
    job.lose_node("n1")
    wait_until(lambda: job.alive_nodes("n2") == {"n2", "n3"}, "n2 considers n1 dead")
    expect_newest(job, ("n2", "n3"))


def test_all_agents_restart_within_a_world_and_reconnect(job):
    for name in NAMES:
        job[name].kill_agent()
    for name in NAMES:
        job[name].start()
    for name in NAMES:
        wait_until(lambda name=name: job.alive_nodes(name) == {*NAMES}, f"{name} sees all other nodes")
    job.save(2)
    job.wait_replicated(2)
    job.assert_copies(job.shard_keys(2))


def test_agent_killed_while_replicating_for_a_lost_node():
    """n3 is lost, and the holder of its replica dies while it sends that to the last node."""
    partners = place_replicas([PeerNode(validate_node_id(name), "") for name in NAMES], copies=2).partners
    (heir,) = partners[validate_node_id("n3")]
    first_again = 1 + SIZE // MIB + 1  # after all chunks of its own shard
    with agent_job(*NAMES, crash_at={heir: f"peer.sending:{first_again}"}) as job:
        job.save(1)
        job.wait_replicated(1)
        assert job.holders(job.shard_keys(1)[2]) == tuple(sorted({"n3", heir}))
        job.lose_node("n3")
        job[heir].wait_agent_ended()
        job[heir].start()
        job.assert_copies(job.shard_keys(1))


def test_agent_killed_while_repairing_a_copy(job):
    mine = job.shard_keys(1)[0]
    (other,) = set(job.holders(mine)) - {"n1"}
    start_with_crash_point(job, other, "peer.repairing")
    wait_until(lambda: other in job.holders(mine), "the restarted agent adopts its copy")
    flip_byte(job.slot_path(other, mine), SIZE // 2)
    with job[other].agent() as agent:
        assert agent.store.verify(mine) != ()
    job[other].wait_agent_ended()
    job[other].start()
    job.assert_copies(job.shard_keys(1))
    assert len(job.holders(mine)) == 2


def test_reader_continues_from_the_other_copy_when_an_agent_is_killed(job):
    (large,) = job.save(2, "n1", parts=1, size_bytes=LARGE)
    job.wait_replicated(2)
    (other,) = set(job.holders(large)) - {"n1"}
    start_with_crash_point(job, other, "peer.reading", 4)
    wait_until(lambda: other in job.holders(large), "the restarted agent adopts its copy")
    with job.prepared_read(large, [other, "n1"]) as read:
        job["n1"].suspend_agent()  # n1 sends nothing until the other agent is dead
        with ThreadPoolExecutor(1) as aside:
            reading = aside.submit(read)
            job[other].wait_agent_ended()
            job["n1"].resume_agent()
            data, pulled = reading.result(120)
    assert data == shard_content(large, LARGE)
    assert pulled.failed == {}
    assert set(pulled.bytes_from) == {other, "n1"}
    assert sum(pulled.bytes_from.values()) == LARGE
    job[other].start()
    job.assert_copies([large], size_bytes=LARGE)
