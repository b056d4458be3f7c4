"""After SIGKILL of the agent at any point, acknowledged data exists and no data is incomplete."""

import os
import signal

import pytest

from peerstore.errors import AgentUnreachableError, PeerStoreError, ShardNotFoundError
from peerstore.failpoints import FAILPOINTS
from peerstore.shard_records import VersionId
from tests.support.stores import (
    MIB,
    flip_byte,
    load_shard,
    pinned_file,
    shard_content,
    shard_key,
    store_agent,
    store_directory,
    write_slot,
)

pytestmark = pytest.mark.e2e

BUDGET = ("--budget", "64MiB")
WORKING = {
    "agent.claimed": [1],
    "agent.metadata": [1, 2, 5],
    "agent.created": [1, 3],
    "agent.leased": [1, 2, 7],
    "agent.grown": [1, 5],
    "agent.hashed": [1, 2, 5],
    "agent.sealing": [1, 2, 5],
    "agent.sealed": [1, 2, 5],
    "agent.deleted": [1, 2, 5],
    "agent.dropped": [1],
}
"""Each point, and the numbers of the passes that kill the agent."""
STARTING = ["agent.recovering", "agent.recovered"]
PARTS = (0, 1)


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place


def test_every_crash_point_of_the_agent_has_a_case():
    assert {point for point in FAILPOINTS if point.startswith("agent.")} == {*WORKING, *STARTING}


def size_of(of):
    return MIB + of.version * 4096 + of.part


def work(client, versions, sealed):
    """Save versions with two writers: slots are reused or grown, versions are superseded and deleted."""
    client.claim("job", "a")
    client.blobs.put("job", "settings", b"kept")
    for version in versions:
        for part in PARTS:
            of = shard_key(version, part)
            lease = client.lease(of, 1000 if version % 2 else 9 * MIB // 4, 2)  # a much smaller object fits no slot
            lease = client.grow(lease.id, 2 * size_of(of))
            write_slot(lease, shard_content(of, size_of(of)))
            client.seal(lease.id, size_of(of), b"meta")
            sealed.append(of)
        client.versions.mark_committed("job", shard_key(version).version_id)
    sealed[:] = [of for of in sealed if of.version != versions[-1]]
    client.versions.delete("job", [shard_key(versions[-1]).version_id])
    lease = client.lease(shard_key(versions[-1], 0, attempt=1), 58 * MIB, 2)  # evicts another writer's free slot
    client.release(lease.id)


def check(client, sealed):
    """Check that every listed shard is intact, and that the newest complete version still exists."""
    here = [fact.key for fact in client.list_shards("job")]
    for of in here:
        assert load_shard(client, of) == shard_content(of, size_of(of))
        assert client.verify(of) == ()
    whole = [v for v in {of.version for of in sealed} if all(shard_key(v, part) in sealed for part in PARTS)]
    if whole:
        newest = max(whole)
        assert {of for of in sealed if of.version >= newest} <= set(here)
    assert client.status().damage_reports == ()


def assert_usable(client):
    """Check that both incarnations can still use the whole store."""
    epoch = client.claim("job", "b")
    for version in range(90, 93):
        for part in PARTS:
            of = shard_key(version, part, epoch=epoch, name="b")
            lease = client.lease(of, 2 * MIB, 2, wait_s=5)
            write_slot(lease, shard_content(of, size_of(of)))
            client.seal(lease.id, size_of(of))
    assert max(client.list_shards("job"), key=lambda fact: fact.key).key.version == 92
    assert client.status().jobs[0].newest_committed == 92


KILLS = [
    pytest.param(point, count, marks=() if turn == row % len(counts) else pytest.mark.nightly)
    for row, (point, counts) in enumerate(WORKING.items())
    for turn, count in enumerate(counts)
]
"""Every crash point at each of its counts; each point runs at one count on every push."""


@pytest.mark.parametrize(("point", "count"), KILLS)
def test_agent_killed_during_work(directory, point, count):
    sealed = []
    with store_agent(directory, *BUDGET, crash_at=f"{point}:{count}") as agent:
        if agent.wait_ready():
            with pytest.raises(AgentUnreachableError), agent.client(retry_s=0, job="job") as client:
                work(client, range(6), sealed)
        assert agent.process.wait(10) == -signal.SIGKILL
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20, job="job") as client:
        check(client, sealed)
        assert_usable(client)


def test_crash_variable_alone_kills_no_agent(directory, monkeypatch):
    monkeypatch.setenv("PEERSTORE_CRASH_AT", ",".join([*WORKING, *STARTING]))
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20, job="job") as client:
        sealed = []
        work(client, range(3), sealed)
        check(client, sealed)
        assert agent.end() == 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", STARTING)
def test_agent_killed_during_adoption(directory, point, count):
    saved = [shard_key(version, part) for version in (3, 4) for part in PARTS]
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        for of in saved:
            lease = client.lease(of, size_of(of), 2)
            write_slot(lease, shard_content(of, size_of(of)))
            client.seal(lease.id, size_of(of))
        agent.kill()
    with store_agent(directory, *BUDGET, crash_at=f"{point}:{count}") as agent:
        assert agent.process.wait(20) == -signal.SIGKILL
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        assert sorted(fact.key for fact in client.list_shards("job")) == saved
        check(client, saved)
        assert_usable(client)


def test_flipped_byte_is_reported_and_the_version_is_not_committed(directory):
    """The newest version is damaged, so the older one is kept, even after the newest was committed."""
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        for of in [shard_key(1), shard_key(2)]:
            lease = client.lease(of, MIB, 1)
            write_slot(lease, shard_content(of, MIB))
            client.seal(lease.id, MIB)
            client.versions.mark_committed("job", of.version_id)
        pin = client.pin(shard_key(2))  # the pin's file stays open until the client closes it
        slot = pinned_file(pin).readlink()
        agent.kill()
    flip_byte(slot, MIB // 2)
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        assert [fact.key for fact in client.list_shards("job")] == [shard_key(1)]
        with pytest.raises(ShardNotFoundError):
            client.pin(shard_key(2))
        (damage,) = client.status().damage_reports
        assert (damage.job, damage.what) == ("job", "job/2 part 0 (epoch 1 a)")
        assert "chunks differ after a restart" in damage.reason
        client.versions.mark_committed(
            "job", shard_key(2).version_id
        )  # from a client that does not know of the damage yet
        assert client.status().jobs[0].newest_committed == 1
        for version in (3, 4):  # incomplete: a second part never comes
            lease = client.lease(shard_key(version), MIB, 2)
            client.seal(lease.id, 10)
        with pytest.raises(PeerStoreError):
            client.lease(shard_key(5), MIB, 2)
        assert load_shard(client, shard_key(1)) == shard_content(shard_key(1), MIB)


@pytest.mark.parametrize(
    ("harm", "left", "damages"),
    [
        ("truncate the slot", [1], 1),
        ("remove the slot", [1], 1),
        ("damage the note", [1], 1),
        ("remove the note", [1], 0),
    ],
)
def test_files_missing_at_adoption_are_absent(directory, harm, left, damages):
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        for of in [shard_key(1), shard_key(2)]:
            lease = client.lease(of, MIB, 1)
            write_slot(lease, shard_content(of, MIB))
            client.seal(lease.id, MIB)
            client.versions.mark_committed("job", of.version_id)
        pin = client.pin(shard_key(2))  # the pin's file stays open until the client closes it
        slot = pinned_file(pin).readlink()
        agent.kill()
    note = directory / "notes" / f"seal.{slot.name}"
    match harm:
        case "truncate the slot":
            os.truncate(slot, 4096)
        case "remove the slot":
            slot.unlink()
        case "damage the note":
            flip_byte(note, 40)
        case "remove the note":
            note.unlink()
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        assert [fact.key.version for fact in client.list_shards("job")] == left
        assert len(client.status().damage_reports) == damages
        assert client.status().jobs[0].newest_committed == 1
        assert load_shard(client, shard_key(1)) == shard_content(shard_key(1), MIB)


def test_writer_continues_its_lease_after_an_agent_restart(directory):
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        lease = client.lease(shard_key(1), MIB, 1)
        write_slot(lease, shard_content(shard_key(1), MIB)[:1000])
        agent.kill()
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        write_slot(lease, shard_content(shard_key(1), MIB)[1000:], 1000)
        client.seal(lease.id, MIB)
        assert load_shard(client, shard_key(1)) == shard_content(shard_key(1), MIB)


def test_a_past_incarnation_stays_fenced_after_a_restart(directory):
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        lease = client.lease(shard_key(1), MIB, 1)
        assert client.claim("job", "newer") == 2
        agent.kill()
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        assert client.epoch("job") == 2
        for attempt in (lambda: client.seal(lease.id, 10), lambda: client.lease(shard_key(2), MIB, 1)):
            with pytest.raises(PeerStoreError, match=r"past incarnation|not known"):
                attempt()
        assert client.status().arena.leases == 0


def test_deleted_version_does_not_return(directory):
    group = VersionId(1, 1, 0, "a")
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        lease = client.lease(shard_key(1), MIB, 1)
        client.seal(lease.id, MIB)
        client.versions.mark_committed("job", group)
        client.pin(shard_key(1))
        assert client.versions.delete("job", [group]) == 1
        agent.kill()
    with store_agent(directory, *BUDGET) as agent, agent.client(retry_s=20) as client:
        assert client.list_shards("job") == []
        assert client.status().jobs[0].newest_committed is None
