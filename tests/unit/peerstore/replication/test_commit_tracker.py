"""The leader's count of replicas while other nodes are slow to receive its decisions."""

import threading
from types import SimpleNamespace

import pytest

from peerstore.commit_protocol import CommitReports, JobVersions, PartsReport
from peerstore.replication.commit_tracker import CommitTracker, ReplicationTotals
from peerstore.shard_records import VersionId

NODES = [f"n{number:03}" for number in range(60)]
PATIENCE_S = 60.0


class Job:
    """Nodes of a job that block until they may receive, and the decisions they received."""

    def __init__(self):
        self.may = threading.Event()
        self.told = []
        self._groups = {}
        self._lock = threading.Lock()
        self.all = threading.Event()
        store = SimpleNamespace(
            replicas=SimpleNamespace(apply_decision=self._decide),
            jobs=SimpleNamespace(versions=lambda job: JobVersions(replicated=self._groups.get(job))),
        )
        tending = SimpleNamespace(
            this_node=SimpleNamespace(id=NODES[0]),
            alive=dict.fromkeys(NODES),
            has_quorum=True,
            generation_of=lambda _node: 0,
            client_for=lambda node: SimpleNamespace(call=lambda op, body, *_, **__: self._hear(node, op, body)),
        )
        changed = threading.Condition()
        reports = CommitReports(NODES[0])
        self.settlement = CommitTracker(
            store, "j", tending, reports=reports, totals=ReplicationTotals(), changed=changed
        )

    def _decide(self, job, found):
        self._groups[job] = found.replicated

    def _hear(self, node, op, body):
        assert op == "commit_decision"
        assert self.may.wait(PATIENCE_S)
        with self._lock:
            self.told.append((node, body.replicated.version))
            if {one for one, version in self.told if version == max(v for _, v in self.told)} == {*NODES[1:]}:
                self.all.set()

    def settle(self, version):
        self.settlement.handle_report(PartsReport(VersionId(1, version, 0, "a"), 1, (0,), NODES[1]))


@pytest.fixture
def job():
    job = Job()
    yield job
    job.may.set()
    job.settlement.close()


def test_report_does_not_wait_for_the_broadcast(job):
    reporter = threading.Thread(target=job.settle, args=(1,), daemon=True)
    reporter.start()
    reporter.join(PATIENCE_S / 10)
    assert not reporter.is_alive()
    assert not job.told
    job.may.set()
    assert job.all.wait(PATIENCE_S)
    assert sorted(job.told) == [(node, 1) for node in NODES[1:]]


def test_late_receiver_gets_only_the_newest_decision(job):
    for version in range(1, 30):
        job.settle(version)
    job.may.set()
    assert job.all.wait(PATIENCE_S)
    assert len(job.told) <= 2 * len(NODES)  # those in flight with the first decision, and one more each
