"""Slow, lossy, corrupting and broken paths between nodes: copies and reads arrive intact.

A path shapes only connections that begin after its creation, so tests create it before the nodes connect.
"""

import contextlib
import itertools
import math

import pytest

from tests.support.partitioned_hosts import JOB, partitioned_job, wait_until
from tests.support.stores import MIB, shard_content, shard_key
from tests.system.test_hosts import retransmitted
from tieredckpt.checkpointer.save_handle import describe_replication

pytestmark = pytest.mark.system
SIZE = 8 * MIB + 12345
PATIENCE_S = 90


@contextlib.contextmanager
def two_nodes(net):
    """Yield two nodes and their path; its ``forth`` carries the bytes from n1 to n2."""
    paths = []
    with partitioned_job(net, "n1", "n2", wire=lambda net: paths.append(net.slow_path(*net.hosts.values()))) as job:
        job.claim_incarnation("n1")
        yield job, paths[0]


@contextlib.contextmanager
def three_nodes(net, **shape):
    """Yield three nodes; ``paths[a, b].forth`` carries the bytes from a to b on connections of a."""
    paths = {}

    def wire(net):
        for one, other in itertools.permutations(net.hosts.values(), 2):
            paths[one.name, other.name] = net.slow_path(one, other, **shape)

    with partitioned_job(net, "n1", "n2", "n3", wire=wire) as job:
        job.claim_incarnation("n1")
        yield job, paths


class TestSlow:
    def test_throttled_path_delays_copies_and_no_save(self, net):
        """Version 1 takes seconds at 100 Mbit/s, so version 2 is certain to wait behind it."""
        with partitioned_job(net, "n1", "n2") as job:
            job.claim_incarnation("n1")
            n1, size = job["n1"], 32 * MIB
            n1.host.throttle("100mbit")
            keys = [shard_key(version, job=JOB) for version in (1, 2)]
            for of in keys:
                n1.write(of, size, parts=1)
            assert describe_replication(n1.replication_status(keys[1])) == "1 copy, 1 on the way"
            assert n1.has_intact_shard(keys[0])
            found = n1.replication_status(keys[1], copies=2, timeout_s=PATIENCE_S)
            assert describe_replication(found) == "2 copies in 2 racks"
            job.wait_replicated(2)
            job.assert_intact_copies(keys[1:])

    def test_lossy_path_delays_copies_without_damage(self, net):
        with partitioned_job(net, "n1", "n2") as job:
            job.claim_incarnation("n1")
            job["n1"].host.set_loss(0.05)
            keys = [of for version in (1, 2) for of in job.write(version, size_bytes=SIZE)]
            job.wait_replicated(2)
            assert retransmitted(job["n1"].host) > 0
            job.assert_intact_copies(keys[2:])
            for reader, source in ("n2", "n1"), ("n1", "n2"):
                data, pulled = job[reader].read(keys[2], source)
                assert not pulled.failed
                assert data == shard_content(keys[2], SIZE)

    def test_distant_nodes_replicate_and_read(self, net):
        with three_nodes(net, latency_s=0.05) as (job, _):
            keys = job.write(1, size_bytes=SIZE)
            job.wait_replicated(1)
            job.assert_intact_copies(keys)
            for reader in job:
                of = next(of for of in keys if not reader.holds(of))
                data, pulled = reader.read(of, *sorted(job.holders(of)))
                assert not pulled.failed
                assert data == shard_content(of, SIZE)


class TestCorrupt:
    def test_bit_flipped_during_replication_over_a_network_is_sent_again(self, net):
        with two_nodes(net) as (job, path):
            flipped = path.forth.flip_bit(at_byte=2 * MIB)
            (of,) = job.write(1, "n1", size_bytes=SIZE)
            assert flipped.wait(PATIENCE_S)
            job.wait_replicated(1)
            job.assert_intact_copies([of])
            assert "came from n1 damaged" in job["n2"].agent.log_text()
            assert not job["n1"].replication_status(of).problem
            assert not job["n2"].store.status().damage_reports

    def test_bit_flipped_during_a_read_is_requested_again(self, net):
        """Damage on the path must not discard the source, a good copy."""
        with partitioned_job(net, "n1", "n2") as job:
            job.claim_incarnation("n1")
            (of,) = job.write(1, "n1", size_bytes=SIZE)
            job.wait_replicated(1)
            path = net.slow_path(job["n2"].host, job["n1"].host)
            flipped = path.back.flip_bit(at_byte=2 * MIB)
            data, pulled = job["n2"].read(of, "n1")
            assert flipped.is_set()
            assert not pulled.failed
            assert data == shard_content(of, SIZE)
            assert "was damaged" not in job["n1"].agent.log_text()
            assert not job["n1"].store.status().damage_reports


class TestBroken:
    def test_replication_retries_after_a_reset_and_seals_no_partial_copy(self, net):
        with two_nodes(net) as (job, path):
            resets = [path.forth.reset_after(size) for size in (3 * MIB, 6 * MIB, 9 * MIB)]
            (of,) = job.write(1, "n1", size_bytes=SIZE)
            assert resets[0].wait(PATIENCE_S)
            assert not job["n2"].holds(of)
            assert job["n1"].replication_status(of).copies == 1
            assert all(reset.wait(PATIENCE_S) for reset in resets)
            job.wait_replicated(1)
            job.assert_intact_copies([of])
            leases = wait_until(lambda: job["n2"].store.status().arena.leases == 0, "slots of broken pushes are free")
            assert leases

    @pytest.mark.parametrize("streams", [1, 2])
    def test_read_resumes_after_a_connection_reset(self, net, streams):
        with partitioned_job(net, "n1", "n2") as job:
            job.claim_incarnation("n1")
            (of,) = job.write(1, "n1", size_bytes=SIZE)
            job.wait_replicated(1)
            path = net.slow_path(job["n2"].host, job["n1"].host)
            reset = path.back.reset_after(5 * MIB)
            data, pulled = job["n2"].read(of, "n1", streams=streams)
            assert reset.is_set()
            assert not pulled.failed
            assert data == shard_content(of, SIZE)


def stall_during_copy(path, seat, of, *others):
    """Stall the paths, in both directions, in the middle of copying a new shard.

    The shard is larger than all proxy and kernel buffers of a path.
    """
    path.forth.bytes_per_s = 10e6
    before = path.forth.passed_bytes
    seat.write(of, 64 * MIB, parts=1)
    wait_until(lambda: path.forth.passed_bytes > before + 4 * MIB, "the copy is on its way")
    for stalled in (path, *others):
        stalled.forth.stall()
        stalled.back.stall()
    path.forth.bytes_per_s = math.inf


def resume(*paths):
    for path in paths:
        path.forth.resume()
        path.back.resume()


class TestStalled:
    def test_stalled_replication_is_abandoned_and_blocks_no_trainer(self, net):
        """The third node still reaches the partner, so it gets its copy once the path recovers."""
        with three_nodes(net) as (job, paths):
            n1 = job["n1"]
            partner = n1.partner
            path, of, later = paths["n1", partner], job.key(1, "n1"), job.key(2, "n1")
            stall_during_copy(path, n1, of)
            n1.write(later, MIB, parts=1)
            assert n1.has_intact_shard(later)
            assert n1.replication_status(later).missing_copies == 1
            assert n1.view.sending
            wait_until(lambda: n1.replication_status(of).problem, "the push fails")
            assert not job[partner].holds(of)
            assert n1.replication_status(of).copies == 1
            resume(path)
            job.wait_replicated(2)
            job.assert_intact_copies([later])

    def test_partner_that_stops_answering_during_replication_is_replaced(self, net):
        with three_nodes(net) as (job, paths):
            n1 = job["n1"]
            silent = n1.partner
            (other,) = {"n2", "n3"} - {silent}
            path, of = paths["n1", silent], job.key(1, "n1")
            its = [path for ends, path in paths.items() if silent in ends]
            stall_during_copy(path, n1, of, *its)
            job.wait_replicated(1, "n1", other)
            assert job.holders(of) == {"n1", other}
            resume(*its)
            job.wait_replicated(1)
            job.assert_intact_copies([of])
