"""Export, reshard, and files behind a URL read other nodes' memory as a restore does."""

from __future__ import annotations

import json

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from elastic.cli import main as elastic
from tests.e2e.peers.test_node_lost import full, save
from tests.support.stores import flip_byte
from tieredckpt.cli import main
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.dcp.plain_checkpoints import folder_reader
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.session.session import close_sessions

pytestmark = pytest.mark.e2e

ONCE = {"TIEREDCKPT_PEER_COPIES": "1"}


def same(found, step):
    return all(torch.equal(found[name], tensor) for name, tensor in full(step).items())


@pytest.fixture
def saved(cluster):
    """Put one half of a step on each of two nodes, without replicas."""
    cluster.run(["n1", "n2"], save, [7], 1, environ=ONCE)
    return cluster


@pytest.fixture
def on_n1(saved, monkeypatch):
    """Use the agent of the first node in this process."""
    for name, value in saved["n1"].environ.items():
        monkeypatch.setenv(name, value)
    yield saved
    close_sessions()


def test_export_reads_other_nodes(on_n1, tmp_path, capsys):
    assert main(["export", on_n1.job, str(tmp_path / "out"), "--json"]) == 0
    assert same(load_file(tmp_path / "out"), 7)
    read = json.loads(capsys.readouterr().out)["read_bytes"]
    assert read.keys() == {"memory", "peer"}
    assert min(read.values()) > 1000


def test_reshard_reads_other_nodes(on_n1, tmp_path):
    assert elastic(["reshard", f"tiered://{on_n1.job}", str(tmp_path / "out"), "--ranks", "3"]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in full(7).items()}
    RankGroup(None).call_dcp(dcp.load, state, storage_reader=folder_reader(tmp_path / "out", trust_objects=True))
    assert same(state, 7)


def test_files_behind_a_url_read_other_nodes(on_n1):
    system = fsspec.filesystem("tiered", skip_instance_cache=True)
    folder = f"tiered://{on_n1.job}/step-7"
    names = [name for name in system.ls(folder, detail=False) if name.endswith(".distcp")]
    assert len(names) == 2
    assert all(len(system.cat_file(name)) == system.size(name) for name in names)


def test_unresponsive_node_is_not_damage(on_n1, tmp_path, capsys):
    on_n1["n2"].suspend_agent()
    assert main(["export", f"{on_n1.job}/step-7", str(tmp_path / "out")]) == ExitCode.UNAVAILABLE
    assert not (tmp_path / "out").exists()
    assert "n2" in capsys.readouterr().err
    on_n1["n2"].resume_agent()
    assert main(["export", f"{on_n1.job}/step-7", str(tmp_path / "out")]) == 0


def test_damaged_local_copy_is_read_from_another_node(cluster, monkeypatch, tmp_path, capsys):
    cluster.run(["n1", "n2"], save, [7], 2)
    for name, value in cluster["n1"].environ.items():
        monkeypatch.setenv(name, value)
    flip_shard_bits(cluster["n1"], cluster.job)
    assert main(["export", cluster.job, str(tmp_path / "out"), "--json"]) == 0
    assert same(load_file(tmp_path / "out"), 7)
    assert json.loads(capsys.readouterr().out)["read_bytes"]["peer"] > 1000
    close_sessions()


def flip_shard_bits(host, job):
    """Flip a bit of each shard on this node."""
    with host.agent(job) as agent:
        for fact in agent.store.list_shards(job):
            pin = agent.store.pin(fact.key)
            flip_byte(f"/proc/self/fd/{pin.fd}", pin.record.size_bytes // 2)
            agent.store.unpin(pin.id)
            pin.close()
