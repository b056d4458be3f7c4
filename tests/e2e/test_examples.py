"""The examples run unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tieredckpt.settings import load_settings

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command):
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_loop_example_resumes(agent_dir):
    assert "starting at step 0\nstep 19: " in run(EXAMPLES / "loop.py")
    assert "starting at step 20\nstep 39: " in run(EXAMPLES / "loop.py")


def test_accelerate_example_resumes(agent_dir):
    pytest.importorskip("accelerate")
    assert "starting at step 0\nstep 19: " in run(EXAMPLES / "accelerate_loop.py")
    assert "starting at step 20\nstep 39: " in run(EXAMPLES / "accelerate_loop.py")


@pytest.mark.nightly
def test_torchft_example_recovers_a_killed_replica(agent_dir):
    pytest.importorskip("torchft", reason="torchft is not installed: pip install tieredckpt[torchft]")
    lines = run(EXAMPLES / "torchft_replicas.py").splitlines()
    assert lines[0] == "replica 1 was killed"
    assert sorted(line.partition(", weights ")[0] for line in lines[1:]) == ["replica 0: step 6", "replica 1: step 6"]
    assert len({line.partition(", weights ")[2] for line in lines[1:]}) == 1


@pytest.mark.nightly
def test_megatron_example_resumes(agent_dir):
    pytest.importorskip("megatron.core.package_info", reason="Megatron-Core is not installed")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "megatron_core.py"]
    assert "rank 1: continues after step 0\n" in run(*launch)
    assert "rank 1: continues after step 3\n" in run(*launch)


@pytest.mark.nightly
def test_nvrx_example_resumes(agent_dir):
    pytest.importorskip("nvidia_resiliency_ext", reason="NVRx is not installed: pip install tieredckpt[nvrx]")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "nvrx_local.py"]
    assert "rank 1: found step -1\n" in run(*launch)
    assert "rank 1: found step 2\n" in run(*launch)


@pytest.mark.nightly
def test_ray_example_resumes_after_a_killed_worker(agent_dir, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: pip install tieredckpt[ray]")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    lines = run(EXAMPLES / "ray_train_run.py").splitlines()
    assert "resumed at step 3, ended at step 5" in lines
    assert "restored step 5 from its checkpoint" in lines


@pytest.mark.parametrize("second", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_fsdp2_example_resumes_at_another_world_size(agent_dir, second):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    assert "found nothing saved yet; now steps up to 4" in run(*launch, "2", EXAMPLES / "fsdp2.py")
    assert f"{second} ranks found step 4; now steps up to 9" in run(*launch, str(second), EXAMPLES / "fsdp2.py")


def test_framework_with_urls_only_saves_and_loads(agent_dir):
    assert "equal bit for bit: True" in run("-W", "ignore", EXAMPLES / "by_url.py")


def test_example_configuration_is_valid():
    settings = load_settings({"TIEREDCKPT_CONFIG": str(EXAMPLES / "cluster.yaml")})
    assert settings.durable.every == 200
    assert settings.durable.url == "s3://my-bucket/checkpoints"
