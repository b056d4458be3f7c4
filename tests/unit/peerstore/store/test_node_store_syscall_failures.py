"""Each system call of the store fails once in every way: no data is lost, and a retry works.

No shard is reported as damaged, and no descriptor stays open.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest

from peerstore import checksums
from peerstore.client.store_client import Client
from peerstore.errors import ArenaFullError, PeerStoreError, UnavailableError
from peerstore.peers.peer_messages import ReadRanges
from peerstore.peers.shard_server import RangeServer
from peerstore.server.store_server import StoreServer
from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from peerstore.transport.unix import connect_to_agent
from tests.support.local_nodes import wait_until
from tests.support.stores import MIB, shard_content, shard_key, store_directory
from tests.support.syscall_failures import CODES, MOSTLY_NIGHTLY, CallRecorder

pytestmark = pytest.mark.slow

SIZE = MIB + 5
BUDGET = "12MiB"
BLOB = b"layout" * 1000
COPIED = shard_key(1, part=1, job="other")
"""Brought from another node: its bytes are those of the first version here."""


class Told(StoreListener):
    def __init__(self):
        self.keys = set()

    def on_shard_sealed(self, record):
        self.keys.add(record.key)

    def on_replica_stored(self, record, holders):
        self.keys.add(record.key)


class Agent:
    """A store behind its socket, and a caller that retries when the store is busy."""

    def __init__(self, directory, said, *, unheard=False):
        self.said = said
        self.unheard = unheard
        self.store = self.own(lambda: NodeStore(TmpfsArena(directory), StoreSettings(budget=BUDGET), threads=1))
        self.told = Told()
        self.store.subscribe(self.told)
        path = directory / "agent.sock"
        self.slots = lambda: len(list((directory / "slots").iterdir()))
        self.server = self.own(lambda: StoreServer(self.store, path))
        self.own(self.server.start)
        self.client = self.own(lambda: Client(lambda: connect_to_agent(path), job="job"))

    def own(self, work):
        """Run local work with up to two retries."""
        for left in (2, 1, 0):
            try:
                return work()
            except (PeerStoreError, OSError, RuntimeError):
                if not left:
                    raise
        return None

    def asked(self, work):
        """Run a request over the socket, with retries, and record its errors."""

        def heard():
            try:
                return work()
            except Exception as error:
                self.said.append(error)
                raise

        return self.own(heard)

    def leased(self, of, size=SIZE):
        lease = self.asked(lambda: self.client.lease(of, size, 1))
        return self.filled(lease, of)

    def filled(self, lease, of):
        written(self.asked(lambda: self.client.open_slot(lease.slot)), shard_content(of, SIZE)[: lease.size_bytes])
        return lease

    def sealed(self, lease, of, size=SIZE):
        self.asked(lambda: self.client.seal(lease.id, size, b"meta"))
        self.asked(lambda: self.client.versions.mark_committed(of.job, of.version_id))

    def save(self, of):
        self.sealed(self.leased(of), of)

    def load(self, of):
        pin = self.asked(lambda: self.client.pin(of))
        try:
            return os.pread(pin.fd, pin.record.size_bytes, 0)
        finally:
            self.own(pin.close)
            self.asked(lambda: self.client.unpin(pin.id))

    def has(self, *keys):
        """Check that these shards are stored bit for bit and that no damage is reported."""
        here = {fact.key for fact in self.asked(self.client.list_shards)}
        assert set(keys) <= here, set(keys) - here
        for of in keys:
            assert self.asked(lambda of=of: self.client.verify(of)) == ()
            assert self.load(of) == shard_content(shard_key(1) if of == COPIED else of, SIZE)
        status = self.asked(self.client.status)
        assert status.damage_reports == ()
        assert status.unrecognized == ()
        assert self.unheard or status.arena.pins == 0

    def close(self):
        self.client.close()
        self.own(self.server.close)
        self.own(self.store.close)


def written(fd, data):
    try:
        assert os.pwrite(fd, data, 0) == len(data)
    finally:
        os.close(fd)


@contextlib.contextmanager
def agent(directory, calls, said):
    with contextlib.closing(Agent(directory, said, unheard=calls.reply_was_lost)) as running:
        yield running


def story(directory, calls):
    """Run all events of a shard's life, with two agents that end within it and a forgotten job."""
    one, two, three, four, five = (shard_key(version) for version in range(1, 6))
    said = []
    directory.mkdir(mode=0o700)
    with calls.recording():
        with agent(directory, calls, said) as first:
            first.asked(lambda: first.client.claim("job", "a"))
            first.asked(lambda: first.client.reserve("job", 0, SIZE, slots=1))
            first.save(one)
            first.asked(lambda: first.client.versions.retain("job", one.version_id))
            first.asked(lambda: first.client.blobs.put("job", "layout.x", BLOB))
            first.has(one)
            lease = first.leased(shard_key(2, attempt=1), MIB)
            lease = first.asked(lambda: first.client.grow(lease.id, SIZE))
            lease = first.asked(lambda: first.client.relabel(lease.id, two))
            first.sealed(first.filled(lease, two), two)
            given_up = first.asked(lambda: first.client.lease(three, SIZE, 1))
            first.asked(lambda: first.client.release(given_up.id))
            first.has(one, two)
            first.save(three)  # in the place of the second
            (record,) = first.asked(lambda: first.store.reader.records("job", one.version_id))
            take_copy(first, record)
            lend(first, record)
            first.asked(first.store.sweep)
            first.has(one, three, COPIED)
            first.save(four)
            assert first.slots() == first.asked(first.client.status).arena.slots, "a file that nobody knows"
            left = first.leased(five)
            assert first.told.keys >= {one, two, three, four, COPIED}, "somebody was not told"
        with agent(directory, calls, said) as second:
            second.has(one, four, COPIED)
            assert second.asked(lambda: second.client.versions.retained("job")) == {one.version_id}
            assert second.asked(lambda: second.client.epoch("job")) == 1
            assert second.asked(lambda: second.client.blobs.get("job", "layout.x")) == BLOB
            second.sealed(left, five)
            second.asked(lambda: second.store.replicas.take_ownership(COPIED))
            second.asked(lambda: second.client.versions.retain("job", one.version_id, kept=False))
            second.asked(lambda: second.client.versions.delete("job", [one.version_id]))
            second.has(five, COPIED)
        with agent(directory, calls, said) as third:
            third.has(five, COPIED)
            for job in ("other", "job"):
                third.asked(lambda job=job: third.client.versions.delete(job))
            assert third.asked(third.client.list_shards) == []
        with agent(directory, calls, said) as last:
            assert last.asked(lambda: last.client.blobs.list_names("job")) == []
            assert last.asked(last.client.status).arena.slots == 0, "a slot stays for ever"
    wrong = [error for error in said if not isinstance(error, UnavailableError | ArenaFullError | OSError)]
    assert not wrong, "told as something else"


def take_copy(agent, record):
    """Store a shard as another node sends it."""
    copy = record.__class__(COPIED, 2, record.size_bytes, record.chunk_bytes, record.checksums, b"", 1)
    lease = agent.asked(lambda: agent.store.replicas.begin_replica(copy, whole=True))
    written(agent.asked(lambda: agent.store.open_slot(lease.slot)), shard_content(record.key, SIZE))
    agent.asked(lambda: agent.store.replicas.seal_replica(lease.id, copy, ("n1", "n2")))


def lend(agent, record):
    """Read a shard as another node does."""

    def lent():
        asked = ReadRanges(record.key, checksums.chunk_checksum(record.checksums), ((10, 20), (MIB, SIZE)))
        with contextlib.closing(RangeServer(agent.store).open("job", asked)) as loan:
            loan.fill()
            return bytes(loan.payload[0])

    assert agent.asked(lent) == shard_content(record.key, SIZE)[10:20]


def played(directory, calls):
    before = descriptors()
    story(directory, calls)
    wait_until(lambda: descriptors() <= before, "everything that was opened is closed")


def descriptors():
    """Return open descriptors by number and target: another test may close its own meanwhile."""
    open_ = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            open_.add((fd.name, str(fd.readlink())))
    return open_


@pytest.fixture(scope="module")
def made():
    with store_directory() as directory:
        watching = CallRecorder("peerstore")
        played(directory, watching)
    return watching.made


def each_fails(calls, code):
    wrong, unmet = [], 0
    for call in calls:
        with store_directory() as directory:
            failing = CallRecorder("peerstore", failing=call, code=code)
            try:
                played(directory, failing)
            except Exception as error:
                wrong.append(f"{call}: {error!r}")
            unmet += not failing.failed
            shutil.rmtree(directory, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {len(calls)}\n" + "\n".join(wrong)
    assert unmet <= len(calls) // 10, "not the same calls again"


@pytest.mark.parametrize("code", MOSTLY_NIGHTLY)
def test_failed_syscall_loses_no_data_and_the_retry_succeeds(made, code):
    """Each call site fails with one of the errors. A push runs two errors with their share of the sites."""
    places = list({(call.what, call.stack[:2]): call for call in made}.values())
    assert len(places) > 100
    each_fails(places[CODES.index(code) :: len(CODES)], code)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_every_syscall_failure_loses_no_data(made, code):
    each_fails(made, code)
