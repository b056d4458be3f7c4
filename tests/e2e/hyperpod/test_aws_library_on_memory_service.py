"""AWS's published checkpointing library on node agents instead of its own daemon."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.aws_on_ranks import load_newest, save_steps
from tests.support.memory_nodes import memory_nodes
from tests.support.memory_servers import aws_server, aws_source_file, our_server, request
from tests.support.ranks import RankPool

pytest.importorskip("amzn_sagemaker_checkpointing")

_THEIR_PORTS = (29500, 29501)
"""The rendezvous ports of the ranks in AWS's test file."""
_BESIDE_THEIR_FILE = '''
"""Stands where their file looks for a server of its own and for the client's address."""

import logging
import os
from unittest import mock


def start_membrain_server():
    return mock.Mock()  # it runs


def patch_membrain_client():
    from amzn_sagemaker_checkpointing.checkpointing.filesystem import storage_base
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient

    made = InMemoryCheckpointClient.__init__

    def make(self, *args, config=None, **kwargs):
        made(self, *args, config=InMemoryClientConfig(base_url=os.environ["OUR_SERVICE"]), **kwargs)

    InMemoryCheckpointClient.__init__ = make
    storage_base._TieredStorageBase._setup_logger = staticmethod(lambda *_: logging.getLogger("aws"))
'''


def test_data_of_a_lost_node_is_loaded_from_another(ranks: RankPool) -> None:
    """Both ranks save through n1, which dies; n2 serves everything, even after its agent is killed."""
    with memory_nodes("n1", "n2", memory_service_auth="off") as nodes:
        n1, n2 = nodes["n1"], nodes["n2"]
        ranks.run(2, save_steps, [n1.url, n1.url], "job-1", [10, 20])
        n2.wait_shards(6)
        n1.lose()
        assert ranks.run(2, load_newest, [n2.url, n2.url], "job-1") == [(20, True)] * 2
        n2.kill_agent()
        n2.start()
        assert ranks.run(2, load_newest, [n2.url, n2.url], "job-1", 10) == [(10, True)] * 2
        ranks.run(2, save_steps, [n2.url, n2.url], "job-1", [30])
        assert ranks.run(2, load_newest, [n2.url, n2.url], "job-1") == [(30, True)] * 2


def test_every_node_serves_every_shard_and_retains_the_same_number(ranks: RankPool) -> None:
    """Each rank uses another node, as if the service's name resolved to all of them."""
    with memory_nodes("n1", "n2", memory_service_auth="off", memory_service_copies="1") as nodes:
        n1, n2 = nodes["n1"], nodes["n2"]
        ranks.run(2, save_steps, [n1.url, n2.url], "job-1", [10, 20, 30, 40])
        assert ranks.run(2, load_newest, [n2.url, n1.url], "job-1") == [(40, True)] * 2
        n1.wait_shards(6)  # three of four steps are kept: one shard each, and a plan
        n2.wait_shards(3)
        assert request(n2.address, "DELETE", "/v1/cp/namespaces/job-1").status == 200
        assert request(n1.address, "GET", "/v1/cp/namespaces/job-1").status == 404
        n1.wait_shards(0)


def test_lost_shard_makes_all_ranks_load_an_older_complete_step(ranks: RankPool) -> None:
    with our_server() as address:
        urls = [f"http://{address}"] * 2
        ranks.run(2, save_steps, urls, "job-1", [10, 20, 30])
        assert request(address, "DELETE", "/v1/cp/checkpoints/job-1/1/30").status == 200
        assert ranks.run(2, load_newest, urls, "job-1") == [(20, True)] * 2


def test_lost_shard_fails_the_load_on_the_aws_server(ranks: RankPool) -> None:
    with aws_server() as address:
        urls = [f"http://{address}"] * 2
        ranks.run(2, save_steps, urls, "job-1", [10, 20, 30])
        assert ranks.run(2, load_newest, urls, "job-1") == [(30, True)] * 2
        assert request(address, "DELETE", "/v1/cp/checkpoints/job-1/1/30").status == 200
        with pytest.raises(AssertionError, match=r"CheckpointException|get_s3_uri"):
            ranks.run(2, load_newest, urls, "job-1")


def test_job_rejoins_its_namespace_with_fewer_ranks(ranks: RankPool) -> None:
    """The namespace has five ranks; the plan of two ranks shows that nothing is missing."""
    with our_server() as address:
        urls = [f"http://{address}"] * 2
        assert request(address, "POST", "/v1/cp/namespaces/job-1?num_ranks=5").status == 200
        ranks.run(2, save_steps, urls, "job-1", [10, 20])
        assert request(address, "GET", "/v1/cp/checkpoints/job-1/latest").json == [20, 10]
        assert ranks.run(2, load_newest, urls, "job-1") == [(20, True)] * 2


def test_aws_live_client_script_passes_with_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent requires a token, which is part of its address, unless authentication is off."""
    with memory_nodes("n1") as nodes:
        n1 = nodes["n1"]
        token = (n1.directory / "memory-service.token").read_text()
        assert (n1.directory / "memory-service.token").stat().st_mode & 0o777 == 0o600
        for shown in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Basic {token}"}):
            assert request(n1.address, "POST", "/v1/cp/cluster/reset", headers=shown).status == 401
        basic = base64.b64encode(f"any:{token}".encode()).decode()
        for good in (f"Bearer {token}", f"Basic {basic}"):
            assert request(n1.address, "POST", "/v1/cp/cluster/reset", headers={"Authorization": good}).status == 200
        script = aws_source_file("src/scripts/test_inmemory_client.py")
        assert "http://localhost:9201" in script
        exec(script.replace("http://localhost:9201", f"http://any:{token}@{n1.address}"), {"__name__": "script"})
        assert "All tests passed!" in capsys.readouterr().out


@pytest.mark.nightly
def test_aws_two_rank_test_passes_unchanged(tmp_path: Path) -> None:
    """AWS's test file runs unchanged, next to a module that supplies our service's address and token."""
    for port in _THEIR_PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"their file needs port {port}, which is taken")
    package = tmp_path / "tests" / "local_tests"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    name = "test_distributed_checkpoint.py"
    (package / name).write_text(aws_source_file(f"tests/local_tests/{name}"))
    (package / "common.py").write_text(_BESIDE_THEIR_FILE)
    with memory_nodes("n1") as nodes:
        n1 = nodes["n1"]
        token = (n1.directory / "memory-service.token").read_text()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(package / name)],
            cwd=tmp_path,
            env={**os.environ, "OUR_SERVICE": f"http://any:{token}@{n1.address}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert "2 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
        header = {"Authorization": f"Bearer {token}"}
        for namespace, steps in (("test-single-checkpoint", [42]), ("test-multi-step", [30, 20, 10])):
            found = request(n1.address, "GET", f"/v1/cp/checkpoints/{namespace}/latest?limit=9", headers=header)
            assert found.json == steps
