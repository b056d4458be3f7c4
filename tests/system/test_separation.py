"""Network partitions: permitted work and retained data on each side, and the merge."""

import pytest

from peerstore.errors import ArenaBusyError, FencedError, LeaseLostError, NoQuorumError
from tests.support.partitioned_hosts import partitioned_job, wait_until
from tests.support.stores import MIB

pytestmark = pytest.mark.system
SIZE = 2 * MIB + 12345


@pytest.fixture
def job(net):
    """Yield a job on three nodes in three racks; version 1 is replicated."""
    with partitioned_job(net, "n1", "n2", "n3") as made:
        made.claim_incarnation("n1")
        made.write(1, size_bytes=SIZE)
        made.wait_replicated(1)
        yield made


class TestPartition:
    def test_majority_continues_and_the_fenced_minority_keeps_its_data(self, net, job):
        n1, n2, n3 = job
        here = n3.keys()
        under_way = n3.store.lease(job.key(2, "n3"), SIZE, 3)
        net.partition([n1.host, n2.host], [n3.host])
        wait_until(lambda: not n3.view.quorum, "n3 loses its quorum")
        with pytest.raises(NoQuorumError, match=r"n1 \((suspected|dead) .*n2 \((suspected|dead) "):
            n3.store.claim("separated", "c")
        wait_until(lambda: n1.state_of("n3") == "dead", "n1 declares n3 dead")

        job.claim_incarnation("n1", epoch=2)
        new = job.write(2, "n1", "n2", size_bytes=SIZE, epoch=2)
        job.wait_replicated(2, "n1", "n2")
        job.assert_intact_copies(new, "n1", "n2")
        # The minority's writer does not know yet that it is fenced. Its writes must not evict version 1.
        n3.write(job.key(3, "n3"), SIZE, parts=3)
        with pytest.raises(ArenaBusyError, match="version 1: the newest complete one"):
            n3.write(job.key(4, "n3"), SIZE, parts=3)
        assert n3.newest_replicated == 1
        assert here <= n3.keys()
        assert all(n3.has_intact_shard(of) for of in here)
        assert n3.store.epoch("separated") == 1
        assert not job.holders(job.key(3, "n3"), "n1", "n2")

        net.heal_all()
        wait_until(lambda: n3.store.epoch("separated") == 2, "n3 learns of the new epoch")
        with pytest.raises(FencedError, match=r"epoch 2 \(b\)"):
            n3.write(job.key(5, "n3"), SIZE, parts=3)
        with pytest.raises(LeaseLostError):
            n3.store.seal(under_way.id, SIZE)
        job.wait_replicated(2)
        wait_until(lambda: n1.state_of("n3") == "alive" and n3.view.quorum, "n3 has rejoined")
        newest = job.write(3, size_bytes=SIZE, epoch=2)
        job.wait_replicated(3)
        job.assert_intact_copies(newest)
        assert any(n3.holds(of) for of in newest[:2]), "n3 receives copies again"
        assert not job.holders(job.key(3, "n3"), "n1", "n2")


class TestOneLink:
    def test_one_way_cut_kills_no_node_and_delays_no_version(self, net, job):
        """The third node sees both ends, so both live. Over TCP a cut one way is a cut both ways."""
        n1 = job["n1"]
        partner = n1.partner
        (other,) = {"n2", "n3"} - {partner}
        net.cut(n1.host, job[partner].host, one_way=True)
        keys = job.write(2, size_bytes=SIZE)
        job.wait_replicated(2)
        job.assert_intact_copies(keys)
        assert {seat.state_of(name) for seat in job for name in ("n1", partner)} <= {"alive", "suspect"}
        assert job[other].view.quorum
        net.heal_all()
        keys = job.write(3, size_bytes=SIZE)
        job.wait_replicated(3)
        job.assert_intact_copies(keys)
        wait_until(lambda: all(seat.state_of(name) == "alive" for seat in job for name in job.seats), "all are alive")
