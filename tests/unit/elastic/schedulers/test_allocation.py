"""Allocations from a scheduler's environment and the options of ``elastic run``: a table."""

from __future__ import annotations

import pytest

from elastic.errors import PolicyError
from elastic.schedulers import slurm, torchelastic
from elastic.schedulers.allocation import RunOptions, merge_allocations, resolve_launch


def step(node="n1", nodes="n[1-3]", count=3, **more):
    """The environment of a step's task, as Slurm 22.05 sets it."""
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})" if count > 1 else "1",
        "SLURM_CLUSTER_NAME": "test",
        "SLURMD_NODENAME": node,
        **{name: value for name, value in more.items() if value is not None},
    }


BATCH = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1"}
INTERACTIVE = step(nodes="n1", count=1, SLURM_STEP_ID="4294967290")
POD = {
    "PET_NNODES": "1:4",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:29400",
}
RANKED = {"PET_NNODES": "3", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}


def found(environ, host="job-worker-1", accelerators=0):
    pet = torchelastic.torchelastic_allocation(environ, host=host, accelerators=accelerators, processors=6)
    return merge_allocations(slurm.slurm_allocation(environ), pet)


def place(environ, host="job-worker-1", is_mine=lambda _: False, **options):
    return resolve_launch(RunOptions(**options), found(environ, host), is_mine=is_mine)


def brief(one):
    return one.nnodes, one.nproc, one.node, one.coordinator, one.leads


PORT = 20_000 + 12 * 8

PLACES = [
    # no information at all
    ({}, {}, ("1", 1, "", "", True)),
    ({}, {"nnodes": "2:4", "nproc": 2, "node": "a"}, ("2:4", 2, "a", "", True)),
    ({}, {"coordinator": "h:1"}, ("1", 1, "", "h:1", False)),
    ({}, {"coordinator": "h:1", "coordinator_here": True}, ("1", 1, "", "h:1", True)),
    # a step
    (step(), {}, ("3", 1, "n1", f"n1:{PORT}", True)),
    (step("n2"), {}, ("3", 1, "n2", f"n1:{PORT}", False)),
    (step("n4", "n[3-4]", 2), {}, ("2", 1, "n4", f"n3:{PORT}", False)),
    (step(SLURM_STEP_ID="9"), {}, ("3", 1, "n1", f"n1:{PORT + 1}", True)),
    (step(SLURM_GPUS_ON_NODE="8"), {}, ("3", 8, "n1", f"n1:{PORT}", True)),
    (step(SLURM_GPUS_ON_NODE="8"), {"nproc": 2}, ("3", 2, "n1", f"n1:{PORT}", True)),
    (step("n2"), {"nnodes": "2:3"}, ("2:3", 1, "n2", f"n1:{PORT}", False)),
    (step("n2"), {"nnodes": "1"}, ("1", 1, "n2", f"n1:{PORT}", False)),
    (step("n2"), {"node": "mine"}, ("3", 1, "mine", f"n1:{PORT}", False)),
    # of one node
    (step(nodes="n1", count=1), {}, ("1", 1, "n1", "", True)),
    (step(nodes="n1", count=1), {"simulated": 4, "nnodes": "1:4"}, ("1:4", 1, "", "", True)),
    (step(nodes="n1", count=1), {"nnodes": "2", "coordinator": "h:1"}, ("2", 1, "n1", "h:1", False)),
    # the coordinator's address as an option
    (step("n2"), {"coordinator": ":7"}, ("3", 1, "n2", "n1:7", False)),
    (step("n2"), {"coordinator": "n2:7"}, ("3", 1, "n2", "n2:7", True)),
    (step("n2"), {"coordinator": "n2.cluster.example:7"}, ("3", 1, "n2", "n2.cluster.example:7", True)),
    (step("n1"), {"coordinator": "n2:7"}, ("3", 1, "n1", "n2:7", False)),
    (step("n1"), {"coordinator": "n1:7", "coordinator_here": True}, ("3", 1, "n1", "n1:7", True)),
    (step("n1"), {"coordinator": "elsewhere:7"}, ("3", 1, "n1", "elsewhere:7", False)),
    (step("n1"), {"coordinator": "127.0.0.1:7"}, ("3", 1, "n1", "127.0.0.1:7", True)),
    (step("n2"), {"coordinator": "127.0.0.1:7"}, ("3", 1, "n2", "127.0.0.1:7", False)),
    # a batch script, or a shell of salloc
    (BATCH, {"nnodes": "1"}, ("1", 1, "", "", True)),
    (BATCH, {"simulated": 3, "nnodes": "3"}, ("3", 1, "", "", True)),
    (BATCH, {"nnodes": "2", "coordinator": "h:1"}, ("2", 1, "", "h:1", False)),
    (BATCH | {"SLURM_JOB_NODELIST": "n1"}, {}, ("1", 1, "", "", True)),
    (INTERACTIVE | {"SLURM_JOB_NODELIST": "n1"}, {}, ("1", 1, "", "", True)),
    # pods
    (POD, {}, ("1:4", 2, "", "job-worker-0:29400", False)),
    (RANKED | {"PET_NODE_RANK": "0"}, {}, ("3", 1, "", "job-master-0:23456", True)),
    (RANKED | {"PET_NODE_RANK": "2"}, {}, ("3", 1, "", "job-master-0:23456", False)),
    (RANKED | {"PET_NODE_RANK": "0"}, {"coordinator": ":7", "nproc": 4}, ("3", 4, "", "job-master-0:7", True)),
    (POD | {"PET_NNODES": "1"}, {}, ("1", 2, "", "", True)),
    ({"PET_NPROC_PER_NODE": "4"}, {}, ("1", 4, "", "", True)),
    ({"PET_NPROC_PER_NODE": "cpu"}, {}, ("1", 6, "", "", True)),
    ({"PET_NPROC_PER_NODE": "auto"}, {}, ("1", 6, "", "", True)),
    # both
    (step("n2") | {"PET_NPROC_PER_NODE": "4"}, {}, ("3", 4, "n2", f"n1:{PORT}", False)),
    (step("n2") | {"PET_NNODES": "3"}, {}, ("3", 1, "n2", f"n1:{PORT}", False)),
    (BATCH | RANKED | {"PET_NODE_RANK": "1"}, {}, ("3", 1, "", "job-master-0:23456", False)),
]


@pytest.mark.parametrize(("environ", "options", "expected"), PLACES)
def test_a_place(environ, options, expected):
    if "PET_NNODES" in environ and "SLURM_STEP_ID" in environ:
        environ = {**environ, "PET_MASTER_ADDR": "n1"}
    assert brief(place(environ, **options)) == expected


def test_the_pod_that_the_endpoint_names_leads():
    assert place(POD, host="job-worker-0").leads
    assert place(POD, host="job-worker-0.jobs.svc").leads


def test_gpus_that_are_seen_are_counted():
    assert found({"PET_NPROC_PER_NODE": "auto"}, accelerators=8).nproc == 8
    assert found({"PET_NPROC_PER_NODE": "gpu"}, accelerators=4).nproc == 4


def test_node_with_the_address_leads():
    own = {"n2": "10.0.0.2"}
    for node in ("n1", "n2", "n3"):
        there = place(step(node), coordinator="10.0.0.2:7", is_mine=lambda ip, node=node: own.get(node) == ip)
        assert (there.coordinator, there.leads) == ("10.0.0.2:7", node == "n2")


def test_nodes_agree_on_the_leader_and_the_secret_name():
    places = [place(step(node)) for node in ("n1", "n2", "n3")]
    assert [one.leads for one in places] == [True, False, False]
    assert {(one.coordinator, one.agreement) for one in places} == {(f"n1:{PORT}", "test-12.0-0")}
    assert place(step(SLURM_RESTART_COUNT="2")).agreement == "test-12.0-2"


def test_a_coordinator_elsewhere_has_a_secret_of_its_own():
    assert place(step("n1"), coordinator="elsewhere:7").agreement == ""
    assert place(step("n2"), coordinator="10.0.0.1:7").agreement == "test-12.0-0"


def test_no_node_leads_by_its_place_if_any_may_lead():
    for node in ("n1", "n2"):
        one = place(step(node), coordinator="file:///shared/leader")
        assert brief(one) == ("3", 1, node, "file:///shared/leader", False)
        assert one.other_leader == ""
        assert (one.several, one.is_given_its_coordinator, one.agreement) == (True, False, "")


@pytest.mark.parametrize("environ", [POD, RANKED, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}])
def test_any_pod_may_lead_with_a_leader_record(environ):
    one = place(environ, coordinator="kubernetes:///llama", nnodes="1:2")
    assert (one.nnodes, one.coordinator, one.leads) == ("1:2", "kubernetes:///llama", False)
    assert (one.other_leader, one.agreement, one.is_given_its_coordinator) == ("", "", False)


def test_adjacent_jobs_have_different_ports():
    ports = {
        slurm.slurm_allocation(step(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(at))).port
        for job in range(1000)
        for at in range(8)
    }
    assert len(ports) == 8000
    assert min(ports) >= 20_000
    assert max(ports) < 32_768


def test_signals_mean_the_job_only_in_a_step():
    assert place(step()).notices
    assert place(step(nodes="n1", count=1)).notices
    assert not place(BATCH, nnodes="1").notices
    assert not place(RANKED | {"PET_NODE_RANK": "0"}).notices


def test_each_array_task_is_a_separate_run():
    tasks = [
        step(SLURM_JOB_ID=job, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID=task)
        for job, task in (("12", "1"), ("13", "0"))
    ]
    assert [place(one).run for one in tasks] == ["12", "13"]


REFUSED = [
    ({}, {"coordinator_here": True}, ("--coordinator-here needs --coordinator HOST:PORT",)),
    # a shell: this machine would wait silently for the others
    (BATCH, {}, ("$SLURM_JOB_NODELIST=n[1-4]", "4 machines", "srun --ntasks-per-node=1 elastic run", "--nnodes 1")),
    (BATCH, {"nnodes": "1:4"}, ("$SLURM_JOB_NODELIST=n[1-4]", "srun")),
    (INTERACTIVE, {}, ("$SLURM_JOB_NODELIST=n[1-4]", "srun")),
    # more nodes than the allocation has
    (step(), {"nnodes": "4"}, ("--nnodes 4", "$SLURM_STEP_NODELIST=n[1-3]")),
    (step(nodes="n1", count=1), {"nnodes": "2:4"}, ("--nnodes 2:4", "$SLURM_STEP_NODELIST=n1")),
    (POD, {"nnodes": "5"}, ("--nnodes 5", "$PET_NNODES=1:4")),
    (step(), {"simulated": 2}, ("--simulate-nodes", "$SLURM_STEP_NODELIST=n[1-3]")),
    (step(), {"nnodes": "none"}, ("--nnodes 'none'",)),
    # two leaders, or none
    (step("n2"), {"coordinator": ":7", "coordinator_here": True}, ("--coordinator-here", "n1", "n2")),
    (step("n2"), {"coordinator": "n3:7", "coordinator_here": True}, ("--coordinator-here", "n3", "n2")),
    (step("n2"), {"coordinator_here": True}, ("--coordinator-here", "n1", "n2")),
    (
        RANKED | {"PET_NODE_RANK": "1"},
        {"coordinator": ":7", "coordinator_here": True},
        ("--coordinator-here", "$PET_NNODES=3"),
    ),
    ({"PET_NNODES": "3"}, {}, ("$PET_NNODES=3", "--coordinator HOST:PORT")),
    # contradictions
    (step(SLURM_STEP_NUM_NODES="2"), {}, ("$SLURM_STEP_NODELIST=n[1-3]", "3 names", "$SLURM_STEP_NUM_NODES=2")),
    (step("n9"), {}, ("$SLURMD_NODENAME=n9", "$SLURM_STEP_NODELIST=n[1-3]")),
    (step(nodes="n[1-2],n1"), {}, ("names a node twice",)),
    (step(SLURM_STEP_TASKS_PER_NODE="4(x3)"), {}, ("$SLURM_STEP_TASKS_PER_NODE=4(x3)", "--nproc 4")),
    (step(SLURM_STEP_TASKS_PER_NODE="1(x2),2"), {}, ("1(x2),2", "srun --nodes=3 --ntasks=3 elastic run --nproc 2")),
    (step(SLURM_STEP_TASKS_PER_NODE="two"), {}, ("'two' cannot be read",)),
    (step(SLURM_HET_SIZE="2"), {}, ("$SLURM_HET_SIZE=2",)),
    (step(SLURM_JOB_ID="12_3"), {}, ("$SLURM_JOB_ID='12_3'",)),
    (step(nodes="n[1-99999]", count=99999), {}, ("has 99999 names",)),
    (step() | {"PET_NNODES": "2"}, {}, ("$PET_NNODES=2", "$SLURM_STEP_NODELIST=n[1-3]")),
    (
        step(SLURM_GPUS_ON_NODE="8") | {"PET_NPROC_PER_NODE": "4"},
        {},
        ("$PET_NPROC_PER_NODE is 4", "$SLURM_GPUS_ON_NODE 8"),
    ),
    ({"PET_NNODES": "4:1"}, {}, ("$PET_NNODES=4:1",)),
    ({"PET_NPROC_PER_NODE": "many"}, {}, ("$PET_NPROC_PER_NODE=many",)),
    ({"PET_NPROC_PER_NODE": "0"}, {}, ("$PET_NPROC_PER_NODE=0",)),
    ({"PET_NPROC_PER_NODE": "gpu"}, {}, ("$PET_NPROC_PER_NODE=gpu", "no GPU")),
    (RANKED | {"PET_NODE_RANK": "3"}, {}, ("$PET_NODE_RANK=3", "$PET_NNODES=3")),
    (RANKED | {"PET_NODE_RANK": "one"}, {}, ("$PET_NODE_RANK=one",)),
    (RANKED | {"PET_MASTER_PORT": "none"}, {}, ("$PET_MASTER_PORT=none",)),
    (
        RANKED | {"PET_RDZV_ENDPOINT": "other:23456"},
        {},
        ("$PET_RDZV_ENDPOINT=other:23456", "$PET_MASTER_ADDR=job-master-0"),
    ),
    (POD | {"PET_RDZV_BACKEND": "etcd-v2"}, {}, ("$PET_RDZV_BACKEND=etcd-v2", "--coordinator HOST:PORT")),
]


@pytest.mark.parametrize(("environ", "options", "words"), REFUSED)
def test_contradictory_options_are_refused_by_name(environ, options, words):
    with pytest.raises(PolicyError) as refused:
        place(environ, **options)
    for word in words:
        assert word in str(refused.value)
