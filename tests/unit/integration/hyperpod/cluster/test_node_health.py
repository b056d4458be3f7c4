"""Faults that count against a machine, the labels they set, and concurrent label changes."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client.exceptions import ApiException

from elastic.control.control_plane import RankAssignment
from elastic.errors import UnhealthyProcessError
from elastic.workers.in_process_restart import run_within
from elastic.workers.rank_timeline import RankTimeline
from integration.hyperpod.cluster import node_health
from integration.hyperpod.cluster.node_health import (
    DeviceFault,
    DeviceFaultKind,
    NodeHealthLabels,
    NodeHealthRule,
    classify_device_fault,
    device_faults,
    health_after_faults,
    is_worse_health,
)
from integration.hyperpod.job_resource import NODE_HEALTH_LABEL, NodeHealth
from tieredckpt.cli import main
from tieredckpt.cli.exit_codes import CommandError, ExitCode
from tieredckpt.event_log import read_event_log
from tieredckpt.event_log.event_types import FaultEvent, FileOpened, ProcessBegan, ProcessEnded
from tieredckpt.event_log.log_writer import EventLogWriter

LOST, MEMORY, STUCK, LINK = DeviceFaultKind
WELL, OFF, REBOOT, REPLACE = NodeHealth


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("NVRM: Xid (PCI:0000:53:00): 79, pid=1234, GPU has fallen off the bus.", LOST),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", LOST),
        ("CUDA error: uncorrectable ECC error encountered", MEMORY),
        ("NVRM: Xid (PCI:0000:53:00): 94, pid=77, Contained memory error", MEMORY),
        ("this process is not fit for another world: the device has not answered for 30 s", STUCK),
        ("this process is not fit for another world: the device is broken: CUDA error: unspecified", STUCK),
        ("NVRM: Xid (PCI:0000:53:00): 119, Timeout waiting for RPC from GSP", STUCK),
        ("NVRM: Xid (PCI:0000:53:00): 74, NVLink: fatal error detected on link 3", LINK),
        ("NET/OFI Request completed with error. RC: 113", LINK),
        ("CUDA error: an illegal memory access was encountered", None),
        ("CUDA error: device-side assert triggered", None),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", None),
        ("it was killed by signal 9 (SIGKILL)", None),
        ("Connection closed by peer [10.0.0.79]:94", None),
        ("", None),
    ],
)
def test_device_fault_is_classified_by_its_message(words, kind):
    assert classify_device_fault(words) is kind


def faults(*kinds, at=1000.0):
    return [DeviceFault(at, "n1", kind) for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "health"),
    [
        ([], WELL),
        ([LOST], REBOOT),
        ([MEMORY], REBOOT),
        ([STUCK], WELL),
        ([LINK, STUCK], WELL),
        ([STUCK, STUCK], REBOOT),
        ([LINK, LINK], REBOOT),
        ([LOST, MEMORY], REBOOT),
        ([LOST, LOST], REPLACE),
        ([MEMORY, STUCK, MEMORY], REPLACE),
        ([STUCK] * 4, REPLACE),
    ],
)
def test_the_rule(kinds, health):
    assert health_after_faults(faults(*kinds), 1000.0) is health


def test_only_faults_of_the_window_count():
    rule = NodeHealthRule(window_s=60)
    assert health_after_faults(faults(LOST), 1060.0, rule) is REBOOT
    assert health_after_faults(faults(LOST), 1060.1, rule) is WELL
    assert health_after_faults(faults(LOST), 999.0, rule) is WELL


@given(st.lists(st.sampled_from(list(DeviceFaultKind)), max_size=8), st.sampled_from(list(DeviceFaultKind)))
def test_additional_fault_never_improves_node_health(kinds, more):
    before, after = health_after_faults(faults(*kinds), 1000.0), health_after_faults(faults(*kinds, more), 1000.0)
    assert after.severity >= before.severity


@given(st.none() | st.sampled_from([one.value for one in NodeHealth]) | st.text(), st.sampled_from(list(NodeHealth)))
def test_labels_are_set_for_the_worse_alone(known, wanted):
    if is_worse_health(known, wanted):
        assert known is None or NodeHealth(known).severity < wanted.severity
        assert wanted is not WELL


def test_fault_reported_by_several_ranks_counts_once():
    lost = "CUDA error: GPU is lost"
    events = [
        FileOpened(1.0, 1),
        *(FaultEvent(2.0 + rank, 3, "n1", rank, "error", lost) for rank in range(8)),
        ProcessEnded(11.0, "llama", "rank", "failed", f"UnhealthyProcessError: {lost}", "n1", 3),
        FaultEvent(121.0, 4, "n1", 0, "error", lost),
        FaultEvent(123.0, 5, "n1", 0, "error", lost),
        FaultEvent(4.0, 4, "n1", 0, "error", "uncorrectable ECC error"),
        FaultEvent(4.0, 4, "n2", 0, "error", "ValueError: mine"),
        FaultEvent(5.0, 4, "", -1, "error", lost),
        ProcessEnded(6.0, "llama", "coordinator", "job failed", lost, "n3"),
    ]
    found = [(fault.node, fault.at, fault.kind) for fault in device_faults(reversed(events))]
    assert found == [("n1", 2.0, LOST), ("n1", 4.0, MEMORY), ("n1", 123.0, LOST)]


@pytest.mark.parametrize("answer", ["late", "broken"])
def test_device_check_between_worlds_is_classified(tmp_path, answer):
    """Its message reaches the event log as the last words of the process that it ends."""
    late = threading.Event()

    def device():
        if answer == "broken":
            raise RuntimeError("CUDA error: unspecified launch failure")
        late.wait(60)

    def rank():
        with (
            contextlib.closing(EventLogWriter(tmp_path)) as ledger,
            RankTimeline(ledger, {"ELASTIC_NODE": "n1", "ELASTIC_JOB": "llama"}) as record,
        ):
            record.assigned(RankAssignment(1, 0, 1, 0, 1, 0, 1, "h:1"))
            run_within(60.0 if answer == "broken" else 0.0, device, "the device")

    with pytest.raises(UnhealthyProcessError):
        rank()
    late.set()
    (fault,) = device_faults(read_event_log(tmp_path).events)
    assert (fault.node, fault.kind) == ("n1", STUCK)


class Api:
    """Nodes of a cluster as its client returns them, with optional concurrent changes."""

    def __init__(self, **labels):
        self.labels = {name: {NODE_HEALTH_LABEL: value} if value else None for name, value in labels.items()}
        self.version = 1
        self.meddle = []
        self.refusal = None

    def read_node(self, name):
        if self.refusal:
            raise self.refusal
        if name not in self.labels:
            raise ApiException(status=404, reason="Not Found")
        labels = dict(self.labels[name] or {}) or None
        return SimpleNamespace(metadata=SimpleNamespace(labels=labels, resource_version=str(self.version)))

    def patch_node(self, name, body):
        if self.meddle:
            self.labels[name] = {NODE_HEALTH_LABEL: self.meddle.pop()}
            self.version += 1
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ApiException(status=409, reason="Conflict")
        self.labels[name] = body["metadata"]["labels"]
        self.version += 1


def test_a_label_is_read_and_set():
    api = Api(n1=None, n2="Unschedulable")
    assert NodeHealthLabels(api).get("n1") is None
    assert (
        NodeHealthLabels(api).set_if("n2", REPLACE, when=lambda was: is_worse_health(was, REPLACE)) == "Unschedulable"
    )
    assert api.labels["n2"] == {NODE_HEALTH_LABEL: REPLACE.value}
    assert NodeHealthLabels(api).set_if("n2", REBOOT, when=lambda was: is_worse_health(was, REBOOT)) == REPLACE.value
    assert api.labels["n2"] == {NODE_HEALTH_LABEL: REPLACE.value}


def test_concurrent_label_changes_are_not_lost():
    api = Api(n1=None)
    api.meddle = [REPLACE.value]
    assert NodeHealthLabels(api).set_if("n1", REBOOT, when=lambda was: is_worse_health(was, REBOOT)) == REPLACE.value
    assert api.labels["n1"] == {NODE_HEALTH_LABEL: REPLACE.value}
    api.meddle = ["Schedulable"] * 9
    with pytest.raises(CommandError, match="all the time"):
        NodeHealthLabels(api).set_if("n1", REPLACE, when=lambda _: True)


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, ExitCode.NOT_FOUND), (403, ExitCode.REFUSED), (401, ExitCode.REFUSED), (503, ExitCode.UNAVAILABLE)],
)
def test_kubernetes_refusals_map_to_exit_codes(status, code):
    api = Api()
    api.refusal = ApiException(status=status, reason="no")
    with pytest.raises(CommandError) as refused:
        NodeHealthLabels(api).get("n1")
    assert refused.value.code is code


@pytest.fixture
def cluster(monkeypatch, capsys):
    from integration.hyperpod.cluster.cluster_cli import cluster_group
    from tieredckpt import cli

    known = cli.LazyCommandGroup.get_command
    monkeypatch.setattr(
        cli.LazyCommandGroup,
        "get_command",
        lambda self, ctx, name: cluster_group if name == "cluster" else known(self, ctx, name),
    )
    api = Api(n1=None, n2=REPLACE.value)
    monkeypatch.setattr(node_health, "connect_node_labels", lambda *_: NodeHealthLabels(api))

    def run(*words):
        code = main(["cluster", "node-health", *map(str, words)])
        return (code, *capsys.readouterr())

    run.api = api
    return run


def test_the_command_reads_and_sets(cluster):
    assert cluster("n1")[:2] == (0, "n1 has no label\n")
    assert cluster("n1", "--set", "UnschedulablePendingReboot")[1].startswith("n1 UnschedulablePendingReboot (was: no")
    assert cluster("n1")[1] == "n1 UnschedulablePendingReboot\n"
    assert cluster("n1", "--set", "Schedulable")[0] == 0
    assert cluster("n3")[0] == ExitCode.NOT_FOUND
    for wrong in ((), ("n1", "--apply"), ("n1", "--event-log", "x"), ("--set", "Schedulable"), ("n1", "--set", "Well")):
        assert cluster(*wrong)[0] == ExitCode.USAGE


def test_labels_follow_from_an_event_log(cluster, tmp_path):
    now = time.time()
    with contextlib.closing(EventLogWriter(tmp_path)) as ledger:
        ledger.write(ProcessBegan(now - 100, "llama", "coordinator"))
        for epoch, node in ((1, "pod-1"), (2, "n2"), (3, "pod-1")):
            ledger.write(
                FaultEvent(now - 900 + 100 * epoch, epoch, node, 0, "error", "CUDA error: uncorrectable ECC error")
            )
        ledger.write(FaultEvent(now - 10, 4, "n9", 0, "process", "it was killed by signal 9 (SIGKILL)"))
    code, out, _ = cluster("--event-log", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["NODE", "n2", "pod-1"]
    assert cluster.api.labels["n1"] is None
    code, out, _ = cluster("--event-log", tmp_path, "--apply", "--node-name", "pod-1=n1")
    assert code == 0
    assert cluster.api.labels["n1"] == {NODE_HEALTH_LABEL: REPLACE.value}
    assert cluster.api.labels["n2"] == {NODE_HEALTH_LABEL: REPLACE.value}
    assert cluster("--event-log", tmp_path, "--node-name", "pod-1")[0] == ExitCode.USAGE
    assert cluster("--event-log", tmp_path / "absent")[0] == ExitCode.NOT_FOUND
