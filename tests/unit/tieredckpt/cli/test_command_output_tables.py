"""Tables fit in 100 columns and do not truncate long names."""

import io
import itertools
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from elastic.cli.job_control import show_job_status
from elastic.control.control_messages import ElasticJobStatus, NodeSummary
from elastic.world.world_state import WorldPhase
from integration.hyperpod.cluster.cluster_cli import _print_node_health
from peerstore.shard_records import ArenaStatus, JobStatus, StoreStatus, VersionId
from tests.support.cluster_views import cluster_node, cluster_status, step_inventory, version_id
from tieredckpt.cli import agent, gc, inspect, job_list, ls, status, verify
from tieredckpt.cli.cluster_tables import nodes_table, steps_table
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.location import parse_location
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepStatus
from tieredckpt.whatif.redundancy import redundancy_by_step

WIDTH = 100
JOB = "llama-3.1-405b-continued-pretraining-multilingual-mixture-v17-run-2026-11-27"
NODE = "hyperpod-i-0abc123def4567890.us-west-2.compute.internal"
OTHER = "hyperpod-i-0fed987cba6543210.us-west-2.compute.internal"
TENSOR = "optimizer.state.model.layers.101.mlp.experts.63.down_proj.weight.exp_avg_sq"
OBJECT = f"{JOB}/steps/000000120000/3-1-4f2a9c0d/part-00127.safetensors"
REASON = "the object store refused to write the shard: AccessDenied for arn:aws:iam::123456789012:role/training"
DIRECTORY = "/dev/shm/elastic-1000/llama-3.1-405b-continued-pretraining/node-0127/agent"
STEP = VersionId(120_000, 3, "4f2a9c0d11", 1)
GIB = 1 << 30


def agents(out):
    arena = ArenaStatus(900 * GIB, 800 * GIB, 700 * GIB, 64, 0, 0, 0)
    jobs = (JobStatus(JOB, 3, 8, 2, 120_000, None),)
    running = agent.RunningAgent(agent.Path(DIRECTORY), 4194303, StoreStatus(arena, jobs, (), {}, 0), "", (65535, 9090))
    agent._show_agents(out, [running, agent.RunningAgent(agent.Path(DIRECTORY), 4194302, problem=REASON)])
    return [DIRECTORY, JOB, REASON]


def jobs(out):
    row = job_list.job_row(JOB) | {"newest_in_memory": 120_000, "durable_steps": 1200, "newest_durable": 120_000}

    class Sight:
        agent = True

    job_list._show_jobs(out, Sight, [row], {})
    return [JOB]


def steps(out):
    row = ls.StepRow(
        version_id=STEP,
        complete=False,
        durable=False,
        quarantined=REASON,
        copies=2,
        on_peers=True,
        size_bytes=31 * GIB,
        saved_ns=1,
        damaged="",
        crashed_loads=0,
        kept=False,
        drain=None,
        in_memory=127,
        parts=128,
    )
    ls._show_block(out, [row], {119_000: ["plain", "-", "yes", "1", "-", "-", "DCP's own files"]})
    return [REASON]


def shards(out):
    shard = {"part": 127, "tiers": ["memory", "peer", "durable"], "size_bytes": 31 * GIB, "encoding": "safetensors"}
    piece = {"part": 127, "offsets": [0, 0], "sizes": [1, 1]}
    tensor = {
        "name": TENSOR,
        "dtype": "float8_e4m3fn",
        "shape": [16384, 53248],
        "size_bytes": 3 * GIB,
        "sharding": "128 pieces along 0,1",
        "archived": False,
        "pieces": [piece],
    }
    value = {
        "job": JOB,
        "step": 120_000,
        "epoch": 3,
        "incarnation": "4f2a9c0d",
        "saved": "2026-11-27T12:00:00.000+00:00",
        "size_bytes": 31 * GIB,
        "parts": 128,
        "quarantined": "",
        "shards": [shard | {"object": OBJECT}],
        "tensors": [tensor],
        "objects": [{"name": TENSOR, "size_bytes": 12, "parts": [0, 1, 5]}],
    }
    inspect._show(out, value, pieces=False)
    return [OBJECT, TENSOR]


def node_jobs(out):
    row = {
        "job": JOB,
        "epoch": 3,
        "processes": 8,
        "steps_in_memory": 2,
        "newest_complete": 120_000,
        "newest_replicated": 119_000,
        "pending": [{"state": "running", "step": 120_000, "bytes_done": 1, "bytes_total": 3, "error": ""}],
        "drains": [],
    }
    columns = ["JOB", "EPOCH", "PROCESSES", "STEPS", "NEWEST COMPLETE", "REPLICATED", "DRAIN"]
    out.print(status.text_table(columns, [status._cells(row)], right=columns[1:6]))
    return [JOB]


def copies(out):
    check = verify.CopyCheck(STEP, 127, Tier.PEER, 31 * GIB, ExitCode.DAMAGED, 993, (1, 2, 3), OBJECT, REASON, NODE)
    verify._show(out, parse_location(JOB), [check], None, {})
    return [NODE, OBJECT, REASON]


def cluster(out):
    view = cluster_status(
        cluster_node(NODE, "rack=row-17-rack-0042,zone=us-west-2-lax-1a", {6: [0, ~1]}),
        cluster_node(OTHER, "rack=row-18-rack-0043,zone=us-west-2-lax-1b", {6: [1, ~0]}),
    )
    out.print(nodes_table(view, view.nodes))
    survey = step_inventory()
    out.print(steps_table(view, survey, redundancy_by_step(view, survey), 10**10))
    assert version_id(6).version == 6
    return [NODE, OTHER]


def elastic_nodes(out):
    nodes = tuple(NodeSummary(name, 127, "running", 8, 2, 3, 120_000, 119_000, 5.0) for name in (NODE, OTHER))
    phase = next(iter(WorldPhase))
    show_job_status(out, ElasticJobStatus(JOB, phase, 3, nodes, 8, 128, None, 1, REASON, 1, 1, "127.0.0.1:1"))
    return [NODE, OTHER]


def node_health(out):
    row = {"node": NODE, "faults": 3, "last": REASON, "last_at": 0.0, "wanted": "UnschedulablePendingReplacement"}
    _print_node_health(out, [row], 3600.0)
    return [NODE]


def durable_steps(out):
    lost = {"step": 119_000, "size_bytes": GIB, "deleted": False, "reason": REASON}
    value = {
        "deleted": [{"step": 1, "size_bytes": GIB, "quarantined": True}],
        "deleted_bytes": GIB,
        "keep_last": 3,
        "keep_every": 1000,
        "dry_run": True,
        "durable": f"s3://bucket/{JOB}",
        "kept": [1],
        "without_manifest": [lost],
        "discarded_uploads": 0,
    }
    gc._show(out, value)
    return []


def test_copies_count_tiers_and_a_plus_stands_for_other_nodes():
    seen = StepStatus(STEP, 2, {0: (Tier.MEMORY, Tier.PEER), 1: (Tier.PEER,)}, saved_ns=1)
    own = StepStatus(STEP, 1, {0: (Tier.MEMORY,)}, saved_ns=1)
    assert [(row.copies, row.on_peers) for row in (ls.step_row(one, None, "", None) for one in (seen, own))] == [
        (1, True),
        (1, False),
    ]
    both = msgspec.structs.replace(seen, found={0: (Tier.MEMORY, Tier.PEER), 1: (Tier.MEMORY, Tier.PEER)})
    assert ls.step_row(both, None, "", None).copies == 2
    stored = msgspec.structs.replace(own, found={0: (Tier.MEMORY, Tier.DURABLE)})
    shard = SimpleNamespace(key=SimpleNamespace(part=0), meta=SimpleNamespace(saved_ns=1), size_bytes=1)
    assert ls.step_row(stored, SimpleNamespace(parts=1, shards=[shard]), "", None).copies == 2


@pytest.mark.parametrize(
    "show",
    [agents, jobs, steps, shards, node_jobs, copies, cluster, elastic_nodes, node_health, durable_steps],
    ids=lambda show: show.__name__,
)
def test_table_fits_and_loses_nothing(show):
    out = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    names = show(out)
    text = out.file.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= WIDTH, text
    assert "…" not in text
    parts = set(parts_of(lines))
    for name in names:
        assert any(name.replace(" ", "") in part for part in parts), f"{name!r} is not whole in\n{text}"


def parts_of(lines):
    """Yield the text between two blank columns of any run of lines, without its blanks."""
    lines = [line.ljust(WIDTH) for line in lines]
    for start in range(len(lines)):
        for end in range(start, len(lines)):
            run = lines[start : end + 1]
            gaps = [at for at in range(WIDTH) if all(line[at] == " " for line in run)]
            for left, right in itertools.pairwise([-1, *gaps, WIDTH]):
                yield "".join(line[left + 1 : right] for line in run).replace(" ", "")
