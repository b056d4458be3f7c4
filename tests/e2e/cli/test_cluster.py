"""``status``, ``whatif`` and ``top`` against real agents, with predictions compared to the outcome."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

from tests.e2e.peers.test_node_lost import restore, sharded
from tests.support.clusters import make_cluster
from tests.support.jobs import CheckpointJob
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]

NODES = ["n1", "n2", "n3"]


def save_replicated(job, steps):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        for step in steps:
            ckpt.save(sharded(step), step).wait(copies=2, domains=2, timeout_s=60)


@contextlib.contextmanager
def three_nodes(ranks):
    """Steps 5 to 7 in the memory of three nodes in three racks, two copies of each part."""
    with make_cluster(ranks, *NODES, labels=lambda name: f"rack=r{name[1:]}") as made:
        made.run(NODES, save_replicated, [5, 6, 7])
        yield made


@pytest.fixture(scope="module")
def healthy_cluster(ranks):
    """Three nodes that no test changes."""
    with three_nodes(ranks) as made:
        yield made


@pytest.fixture
def expendable_cluster(ranks):
    """Three nodes, some of which the test loses."""
    with three_nodes(ranks) as made:
        yield made


@pytest.fixture
def run_on(cli):
    """Return a function that runs a command on the first node of a cluster, or on another one."""

    def run(cluster, command, *arguments, node="n1"):
        return cli(command, *arguments, "--agent-dir", cluster[node].directory)

    return run


# -- status -----------------------------------------------------------------------------------------------------------


def test_every_node_and_step_is_shown(healthy_cluster, run_on):
    said = run_on(healthy_cluster, "status", "--cluster", "--json")
    assert said.code == 0
    assert (said.json["job"], said.json["seen_from"], said.json["quorum"]) == (healthy_cluster.job, "n1", True)
    nodes = {one["node"]: one for one in said.json["nodes"]}
    assert list(nodes) == NODES
    assert [one["state"] for one in nodes.values()] == ["alive"] * 3
    assert [one["labels"] for one in nodes.values()] == [{"rack": "r1"}, {"rack": "r2"}, {"rack": "r3"}]
    assert all(one["holds"]["own_bytes"] > 0 and one["holds"]["copied_bytes"] > 0 for one in nodes.values())
    step = said.json["steps"][-1]
    assert (step["step"], step["parts"], step["parts_in_memory"], step["state"]) == (7, 3, 3, "complete")
    assert (step["copies"], step["domains"], step["level"], step["under_replicated"]) == (2, 2, "rack", [])
    assert not step["durable"]
    assert said.json["complete"]


def test_every_node_reports_the_same_steps(healthy_cluster, run_on):
    seen = [
        run_on(healthy_cluster, "status", healthy_cluster.job, "--cluster", "--json", node=name).json["steps"]
        for name in NODES
    ]
    assert seen[0] == seen[1] == seen[2]


def test_cluster_tables_show_the_status(healthy_cluster, run_on):
    def status_lines():
        return run_on(healthy_cluster, "status", "--cluster").out.splitlines()

    wait_until(lambda: "protected up to step 7" in status_lines(), "the first node knows that step 7 is replicated")
    lines = status_lines()
    assert lines[0].startswith(f"{healthy_cluster.job}  2 copies wanted")
    assert lines[1] == "n1 sees 3 of 3 nodes: n1, n2, n3"
    assert lines[2:4] == ["protected up to step 7", ""]
    assert lines[4].split()[:7] == ["NODE", "STATE", "RACK", "STEPS", "PARTS", "OWN", "COPIES"]
    assert lines[6].split()[:3] == ["n2", "alive", "r2"]
    (seven,) = [line for line in lines if line.split()[:2] == ["7", "complete"]]
    assert "3 of 3  2 copies in 2 racks" in seven


def test_lost_node_differs_from_an_empty_one(expendable_cluster, run_on):
    expendable_cluster["n3"].lose()
    said = run_on(expendable_cluster, "status", "--cluster", "--json")
    assert said.code == 5
    gone = said.json["nodes"][2]
    assert gone["node"] == "n3"
    assert gone["holds"] is None
    assert gone["unreachable"]
    assert not said.json["complete"]
    shown = run_on(expendable_cluster, "status", "--cluster").out
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("n3 ") and "unavailable" not in line]
    assert row[-4:] == ["?"] * 4
    assert "n3 is unavailable, and its contents are unknown: " in shown


def test_status_shows_this_node_in_a_few_lines(healthy_cluster, run_on):
    said = run_on(healthy_cluster, "status", "--json")
    assert said.code == 0
    (row,) = said.json["jobs"]
    assert (row["job"], row["newest_complete"], row["unreachable"]) == (healthy_cluster.job, 7, {})
    assert said.json["arena"]["sealed_bytes"] > 0
    lines = run_on(healthy_cluster, "status").out.splitlines()
    assert lines[0].split()[0] == "agent"
    assert lines[1].startswith("memory  ")
    assert lines[4].split()[:5] == [healthy_cluster.job, str(row["epoch"]), "0", str(row["steps_in_memory"]), "7"]


# -- whatif -----------------------------------------------------------------------------------------------------------


def test_whatif_prediction_matches_the_restore(expendable_cluster, run_on):
    said = run_on(expendable_cluster, "whatif", "--lose", "node:n2", "--json")
    assert said.code == 0
    foretold = said.json
    assert (foretold["fate"], foretold["step"], foretold["gone"]) == ("resumes", 7, [])
    assert foretold["quorum"] == {"enough": True, "alive": 2, "of": 3}
    assert (foretold["from_memory"], foretold["from_durable"]) == (True, False)
    nodes = {part: set(one["nodes"]) for one in foretold["reads"] for part in one["parts"]}
    assert set(nodes) == {0, 1, 2}
    assert all(one and "n2" not in one for one in nodes.values())
    expendable_cluster["n2"].lose()
    expendable_cluster.add("n4", "rack=r4")
    for _tiers, used in expendable_cluster.run(["n1", "n4", "n3"], restore, foretold["step"]):
        assert set(used) <= {"n1", "n3", "n4"}


def test_whatif_loses_a_rack_and_a_node_together(healthy_cluster, run_on):
    said = run_on(healthy_cluster, "whatif", healthy_cluster.job, "--lose", "node:n1", "--lose", "rack:r3", "--json")
    assert said.code == 3
    assert (said.json["fate"], said.json["step"], said.json["nodes_lost"]) == ("nothing", None, ["n1", "n3"])
    assert said.json["step_now"] == 7
    assert said.json["gone"][0]["step"] == 7
    assert not said.json["quorum"]["enough"]
    shown = run_on(healthy_cluster, "whatif", healthy_cluster.job, "--lose", "node:n1", "--lose", "rack:r3").out
    assert "without node:n1 and rack:r3 (n1 and n3)" in shown
    assert "no complete step would remain" in shown
    assert "no quorum" in shown


def test_unreachable_node_is_neither_present_nor_lost(expendable_cluster, run_on):
    expendable_cluster["n3"].lose()
    said = run_on(expendable_cluster, "whatif", "--lose", "node:n1", "--lose", "node:n2", "--json")
    assert said.code == 5
    assert said.json["fate"] == "unknown"
    assert list(said.json["unknown"]) == ["n3"]
    assert 7 in said.json["perhaps"]
    said = run_on(expendable_cluster, "whatif", "--lose", "node:n1", "--lose", "node:n2", "--lose", "node:n3", "--json")
    assert said.code == 3
    assert (said.json["fate"], said.json["unknown"]) == ("nothing", {})


def test_whatif_lists_losses_with_the_worst_first(healthy_cluster, run_on):
    said = run_on(healthy_cluster, "whatif", "--each", "--json")
    assert said.code == 0
    names = [one["lost"] for one in said.json["losses"]]
    assert sorted(names) == sorted([[f"node:{name}"] for name in NODES] + [[f"rack:r{n}"] for n in (1, 2, 3)])
    assert {one["step"] for one in said.json["losses"]} == {7}
    lines = run_on(healthy_cluster, "whatif", "--each").out.splitlines()
    assert lines[2].split()[:2] == ["IF", "LOST"]
    assert len(lines) == 3 + 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lose", "node:n9"], "there is no such node; there is node: n1, n2, n3"),
        (["--lose", "zone:a"], "no node has a zone; there is node: n1, n2, n3; rack: r1, r2, r3"),
        (["--lose", "n1"], "say what it is, as in node:n1 or rack:r1"),
        ([], "name a loss with --lose"),
        (["--each", "--lose", "node:n1"], "name a loss with --lose"),
    ],
)
def test_wrong_names(healthy_cluster, run_on, arguments, said):
    answer = run_on(healthy_cluster, "whatif", *arguments)
    assert answer.code == 2
    assert said in answer.err


# -- one node ---------------------------------------------------------------------------------------------------------


def test_single_node_job_with_a_durable_tier_is_reported(cli, job):
    said = cli("status", "--cluster", "--json")
    assert said.code == 0
    (me,) = said.json["nodes"]
    assert {one["step"]: (one["durable"], one["copies"]) for one in said.json["steps"]} == {
        1: (True, 0),
        2: (True, 1),
        3: (True, 1),
    }
    assert "only on this node" in cli("status", "--cluster").out
    lost = cli("whatif", "--lose", f"node:{me['node']}", "--json")
    assert (lost.code, lost.json["step"], lost.json["from_durable"], lost.json["quorum"]) == (0, 3, True, None)
    job.lose_memory()
    job.assert_restores(3, tiers={"durable"})


def test_quarantined_and_durable_steps_are_reported(cli, job):
    assert cli("quarantine", "llama/step-3", "--reason", "loss is NaN").code == 0
    shown = cli("status", "llama", "--cluster").out
    assert "step 3 is quarantined: loss is NaN" in shown
    me = cli("status", "--cluster", "--json").json["seen_from"]
    assert cli("whatif", "--lose", f"node:{me}", "--json").json["step"] == 2


def test_command_requires_a_name_with_several_jobs(cli, job, agent_dir, durable):
    CheckpointJob(agent_dir, durable, "other").save(9)
    said = cli("status", "--cluster")
    assert said.code == 2
    assert "several jobs, name one: llama, other" in said.err
    assert [row["job"] for row in cli("status", "--json").json["jobs"]] == ["llama", "other"]
    missing = cli("top", "nothing", "--once")
    assert missing.code == 3
    assert "it has llama, other" in missing.err


@pytest.mark.parametrize("command", [["status"], ["status", "--cluster"], ["whatif", "--each"], ["top", "--once"]])
def test_cluster_is_unknown_without_an_agent(cli, agent_dir, command):
    said = cli(*command)
    assert said.code == 5
    assert "no agent answers" in said.err
    assert not agent_dir.exists()


# -- top --------------------------------------------------------------------------------------------------------------


def test_top_prints_a_single_frame_without_a_terminal(healthy_cluster, run_on):
    said = run_on(healthy_cluster, "top", "--json", "--once")
    assert said.code == 0
    assert (said.json["job"], said.json["steps"][-1]["step"]) == (healthy_cluster.job, 7)
    assert said.json["parts_lacking_copies"] == 0
    assert said.json["bytes_per_s"] is None
    shown = run_on(healthy_cluster, "top").out
    assert "n1 sees 3 of 3 nodes" in shown
    assert "no copies lacking" in shown


def start_top(*arguments, **more):
    return subprocess.Popen([sys.executable, "-m", "tieredckpt", "top", *map(str, arguments)], **more)


def test_top_streams_json_objects_until_interrupted(job, agent_dir):
    process = start_top("--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    frames = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (0, "")
    assert [one["steps"][-1]["step"] for one in frames] == [3, 3, 3]
    assert frames[0]["bytes_per_s"] is None
    assert frames[2]["bytes_per_s"] == {"saved": 0, "sent": 0, "received": 0, "drained": 0}


def test_top_restores_the_terminal(job, agent_dir):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    process = start_top(stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while b"nothing to upload" not in shown:
        shown += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # how a terminal ends
            break
    os.close(ours)
    assert process.wait(30) == 0
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert b"llama" in shown
    assert b"Traceback" not in shown
