"""Defects of AWS's library, which it shows against its own test server and this package does not have.

Each test is named after a line of the table in ``docs/reference/hyperpod.md``.
"""

import contextlib
import http.client
import os
import pickle
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from integration.sagemaker import (
    SageMakerCheckpointConfig,
    SageMakerTieredStorageConfigError,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from tests.support import aws_library
from tests.support.agents import agent_directory
from tests.support.memory_servers import aws_server
from tests.support.memory_service import shard_meta
from tests.support.ports import free_port
from tieredckpt.errors import CheckpointDamagedError, TierUnavailableError
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import load_settings

pytest.importorskip("amzn_sagemaker_checkpointing")
pytestmark = pytest.mark.e2e
ROWS = 6
JOB = "job"
"""The job of the current test, because the tests share an agent."""


# -- functions for the ranks ----------------------------------------------------------------------------------


def state(step):
    """Return rows sharded over all ranks, a replicated tensor, and a number."""
    whole = torch.arange(2.0 * ROWS).view(ROWS, 2) + step
    rows = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"w": rows, "n": step, "t": torch.tensor([float(step)])}


def values(found):
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in found.items()
    }


def outcome(reader):
    """Load, and return the step and the values, or "failed" and the errors."""
    found = {name: value * 0 for name, value in state(0).items()}
    try:
        dcp.load(found, storage_reader=reader)
    except CheckpointException as failed:
        return "failed", [error for error, _ in failed.failures.values()]
    return reader.step, values(found)


class Fails(DefaultSavePlanner):
    """A planner that fails on the last rank."""

    def resolve_data(self, write_item):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("no")
        return super().resolve_data(write_item)


def save(make, steps, *, planner=None, **how):
    for step in steps:
        with contextlib.suppress(CheckpointException) if planner else contextlib.nullcontext():
            _save_state_dict(state(step), make(step), planner=planner and planner(), **how)
    return [values(state(step)) for step in steps]


def aws(url, endpoint="", **more):
    """Return a function for AWS's writers at a step, and one for its readers."""
    aws_library.use_servers(url, endpoint)
    config, writer, reader = aws_library.library_classes()
    of = config(**{"namespace": JOB, "world_size": dist.get_world_size(), **more})
    return (lambda step: writer(of, step=step)), (lambda step=None: reader(of, step))


def ours(**more):
    """Return the same functions for this package's classes of the same names."""
    of = SageMakerCheckpointConfig(**{"namespace": JOB, "world_size": dist.get_world_size(), **more})
    return (
        lambda step: SageMakerTieredStorageWriter(of, step=step),
        lambda step=None: SageMakerTieredStorageReader(of, step),
    )


def aws_saves(steps, url, endpoint="", how=None, **more):
    return save(aws(url, endpoint, **more)[0], steps, **(how or {}))


def aws_loads(url, endpoint="", **more):
    return outcome(aws(url, endpoint, **more)[1]())


def we_save(steps, how=None, **more):
    return save(ours(**more)[0], steps, **(how or {}))


def we_load(step=None, **more):
    return outcome(ours(**more)[1](step))


# -- servers --------------------------------------------------------------------------------------------------


class Server:
    """The memory service at an address, whose content tests change as any client could."""

    def __init__(self, address):
        self.address, self.url, self.job = address, f"http://{address}", ""

    def ask(self, method, path, body=None, headers=None):
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()

    def blob(self, rank, step):
        return self.ask("GET", f"/v1/cp/checkpoints/{self.job}/{rank}/{step}")[1]

    def lose(self, rank, step):
        assert self.ask("DELETE", f"/v1/cp/checkpoints/{self.job}/{rank}/{step}")[0] == 200

    def replace(self, rank, step, data):
        path = f"/v1/cp/checkpoints/{self.job}/{rank}/{step}"
        assert self.ask("POST", path, data, {"Shard-Meta": shard_meta(data)})[0] == 200


@pytest.fixture(scope="module")
def agent():
    """Share one agent between these tests, none of which ends it."""
    with agent_directory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        patch.setenv("TIEREDCKPT_AGENT_BUDGET", "2GiB")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")  # the agent uses the credentials that it was started with
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        open_session("first", load_settings())
        close_sessions()
        yield


@pytest.fixture
def agent_dir(agent):
    yield
    close_sessions()


@pytest.fixture(scope="module")
def running():
    with aws_server() as address:
        yield Server(address)


@pytest.fixture
def server(running, job):
    running.job = job
    assert running.ask("POST", "/v1/cp/cluster/reset")[0] == 200
    return running


@pytest.fixture
def s3(moto, monkeypatch, tmp_path):
    for name, value in {
        "TIEREDCKPT_DURABLE_OPTIONS": f"endpoint={moto.endpoint},region=us-east-1",
        "AWS_ENDPOINT_URL": moto.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://checkpoints/{tmp_path.name}"


class Both:
    """A callable that runs a function on N ranks."""

    def __init__(self, ranks, job):
        self._ranks, self._job = ranks, job

    def __call__(self, world, function, *args, **more):
        return self._ranks.run(world, _call, self._job, function, args, more)


def _call(job, function, args, more):
    global JOB  # noqa: PLW0603 - of this process, until it hears of another
    JOB = job
    return function(*args, **more)


@pytest.fixture
def job(request):
    return re.sub(r"[^a-z0-9]", "-", request.node.name)


@pytest.fixture
def on(ranks, job):
    return Both(ranks, job)


def is_step(found, step, world=2):
    """Check that every rank loaded the complete step."""
    whole = (torch.arange(2.0 * ROWS).view(ROWS, 2) + step).tolist()
    assert found == [(step, {"w": whole, "n": step, "t": [float(step)]})] * world


def failed(found, kind=Exception):
    assert all(said == "failed" for said, _ in found), found
    errors = [error for _, those in found for error in those]
    assert errors
    assert all(isinstance(error, kind) for error in errors), errors


# -- a to c: world sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_a_another_world_reads_memory(on, server, agent_dir, world):
    on(2, aws_saves, [1], server.url)
    failed(on(world, aws_loads, server.url))
    on(2, we_save, [1])
    is_step(on(world, we_load), 1, world)
    is_step(on(world, we_load, memory_url=server.url), 1, world)


def test_b_another_world_reads_s3(on, server, agent_dir, moto, s3):
    on(2, aws_saves, [1], server.url, moto.endpoint, s3_tier_base_path=s3, save_to_s3=True)
    server.ask("POST", "/v1/cp/cluster/reset")
    failed(on(3, aws_loads, server.url, moto.endpoint, s3_tier_base_path=s3))
    is_step(on(3, we_load, s3_tier_base_path=s3), 1, 3)


def test_c_world_size_may_be_the_data_parallel_size(on, server, agent_dir):
    """Two ranks of one replica: AWS's metadata overwrites that of rank 1."""
    on(2, aws_saves, [1], server.url, world_size=1)
    found = on(2, aws_loads, server.url, world_size=1)
    assert [step for step, _ in found] == [1, 1]  # success, but half of the values are zeros
    with pytest.raises(AssertionError):
        is_step(found, 1)
    on(2, we_save, [1], world_size=1)
    is_step(on(2, we_load, world_size=1), 1)


# -- d to g: the newest complete step -------------------------------------------------------------------------


def load_with_one_rank_disconnected(which, url, endpoint, more):
    """Rank 1 does not reach the memory service."""
    seen = url if dist.get_rank() == 0 else f"http://127.0.0.1:{free_port()}"
    if which == "aws":
        return aws_loads(seen, endpoint, **more)
    return we_load(memory_url=seen, **more)


def test_d_all_ranks_load_the_same_step(on, server, agent_dir, moto, s3):
    on(2, aws_saves, [1], server.url, moto.endpoint, s3_tier_base_path=s3, save_to_s3=True)
    on(2, aws_saves, [2], server.url, moto.endpoint, s3_tier_base_path=s3)
    theirs_found = on(2, load_with_one_rank_disconnected, "aws", server.url, moto.endpoint, {"s3_tier_base_path": s3})
    assert [step for step, _ in theirs_found] == [2, 1]  # AWS's library silently mixes the two steps in one model
    is_step(on(2, load_with_one_rank_disconnected, "ours", server.url, moto.endpoint, {"s3_tier_base_path": s3}), 1)


def test_e_lost_shard_falls_back_to_an_older_step(on, server, agent_dir):
    on(2, aws_saves, [1, 2], server.url)
    server.lose(1, 2)
    failed(on(2, aws_loads, server.url))
    is_step(on(2, we_load, memory_url=server.url), 1)


@pytest.mark.parametrize("how", ["cut", "empty"])
def test_f_a_short_blob_is_not_success(on, server, agent_dir, how):
    on(2, aws_saves, [1, 2], server.url)
    rank, blob = next((rank, blob) for rank in (0, 1) if (blob := server.blob(rank, 2)).count(b"PK\x05\x06") > 1)
    server.replace(rank, 2, blob[: blob.index(b"PK\x05\x06") + 22] if how == "cut" else b"")
    found = on(2, aws_loads, server.url)
    assert [step for step, _ in found] == [2, 2]  # success, but all values are zeros
    with pytest.raises(AssertionError):
        is_step(found, 2)
    is_step(on(2, we_load, memory_url=server.url), 1)


def test_g_a_lost_shard_without_another_step_has_a_name(on, server, agent_dir):
    on(2, aws_saves, [1], server.url)
    server.lose(0, 1)
    found = on(2, aws_loads, server.url)
    failed(found)
    assert any(isinstance(error, AttributeError) for _, errors in found for error in errors)
    failed(on(2, we_load, memory_url=server.url), CheckpointDamagedError)


# -- h to k: clients, numbers, names --------------------------------------------------------------------------


def load_with_broken_client():
    import amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_base as base

    def broken(**_):
        raise OSError("no")

    made = aws("http://127.0.0.1:1")[1]
    client, base.InMemoryCheckpointClient = base.InMemoryCheckpointClient, broken
    try:
        reader = made(1)
        return hasattr(reader, "client"), [type(error) for error in outcome(reader)[1]]
    finally:
        base.InMemoryCheckpointClient = client


def test_h_missing_client_is_unreachable_and_not_absent(on, agent_dir):
    ((has, kinds),) = on(1, load_with_broken_client)
    assert not has
    assert not any("InMemory" in kind.__name__ for kind in kinds)  # the error reports a missing key instead
    failed(on(1, we_load, memory_url=f"http://127.0.0.1:{free_port()}"), TierUnavailableError)


@pytest.mark.parametrize(("step", "coordinator"), [(0, 0), (4, 1)])
def test_i_step_zero_and_any_coordinator(on, server, agent_dir, moto, s3, step, coordinator):
    how = {"coordinator_rank": coordinator}
    on(2, aws_saves, [step], server.url, moto.endpoint, how=how, s3_tier_base_path=s3, save_to_s3=True)
    server.ask("POST", "/v1/cp/cluster/reset")
    failed(on(2, aws_loads, server.url, moto.endpoint, s3_tier_base_path=s3))
    is_step(on(2, we_load, s3_tier_base_path=s3), step)
    on(2, we_save, [step + 1], how=how)
    is_step(on(2, we_load), step + 1)


def save_with_stopped_clock(which, url):
    """Save while the clock stands still, as a coarse clock may."""
    real, time.time = time.time, lambda: 1000.0
    try:
        make = aws(url)[0] if which == "aws" else ours()[0]
        dcp.save({"w": torch.ones(2)}, storage_writer=make(1))
    except CheckpointException as error:
        return str(error)
    finally:
        time.time = real
    return "saved"


def test_j_a_save_that_takes_no_time(on, server, agent_dir):
    ((said,),) = ([said] for said in on(1, save_with_stopped_clock, "aws", server.url))
    assert "In-memory write failed" in said
    assert on(1, save_with_stopped_clock, "ours", "") == ["saved"]


def test_k_a_namespace_of_another_size(on, server, agent_dir):
    """One rank made the namespace and two use it; AWS's library does not check the size."""
    on(1, aws_saves, [1], server.url)
    on(2, aws_saves, [2], server.url)
    is_step(on(1, aws_loads, server.url), 1, 1)  # AWS's library takes a shard for step 2's metadata
    is_step(on(1, we_load, memory_url=server.url), 2, 1)
    is_step(on(2, we_load, memory_url=server.url), 2)


# -- l, m: retention ------------------------------------------------------------------------------------------


def we_save_through_failures():
    """Check that failed saves keep the last good step, and that the next good save finds a slot."""
    make, read = ours()
    save(make, [1])
    save(make, [2, 3, 4], planner=Fails)
    assert outcome(read())[0] == 1
    save(make, [2, 3, 4], planner=Fails)
    save(make, [5])


def test_l_failed_saves_do_not_evict_the_last_good_step(on, server, agent_dir):
    on(2, aws_saves, [1], server.url)
    on(2, aws_saves, [2, 3, 4], server.url, how={"planner": Fails})
    failed(on(2, aws_loads, server.url))
    on(2, we_save_through_failures)
    is_step(on(2, we_load, step=1), 1)
    is_step(on(2, we_load), 5)


def save_a_view(which, url):
    make = aws(url)[0] if which == "aws" else ours()[0]
    writer = make(1)
    dcp.save({"w": torch.zeros(1 << 20)[:16]}, storage_writer=writer)
    return writer.record.size_bytes if which == "ours" else 0


def test_m_view_stores_only_its_elements(on, server, agent_dir):
    on(1, save_a_view, "aws", server.url)
    assert len(server.blob(0, 1)) > 4 << 20
    assert on(1, save_a_view, "ours", "")[0] < 1 << 16


# -- defects without a letter ---------------------------------------------------------------------------------


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_metadata_from_the_network_runs_no_code(on, server, agent_dir, tmp_path):
    on(1, aws_saves, [1, 2], server.url)
    server.replace(1, 2, pickle.dumps(Runs(tmp_path / "ran")))
    on(1, aws_loads, server.url)
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    is_step(on(1, we_load, memory_url=server.url), 1, 1)
    assert not (tmp_path / "ran").exists()


def accepts(namespace):
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.checkpoint_helpers import CheckpointHelpers

    config = aws_library.library_classes()[0](namespace=namespace, world_size=1)
    return CheckpointHelpers.validated_checkpoint_config(config) is config


def test_a_namespace_that_leaves_its_folder(on):
    assert on(1, accepts, "../../etc/cron.d/x") == [True]
    with pytest.raises(SageMakerTieredStorageConfigError, match="namespace"):
        SageMakerTieredStorageReader(SageMakerCheckpointConfig("../../etc/cron.d/x", 1))


def save_with_s3_away(which, url, endpoint, base):
    try:
        made = aws(url, endpoint, s3_tier_base_path=base, save_to_s3=True)
        made = made if which == "aws" else ours(s3_tier_base_path=base, save_to_s3=True)
        writer = made[0](1)
        dcp.save(state(1), storage_writer=writer)
    except Exception as error:
        return type(error).__name__
    return writer.in_memory_success, writer.s3_success


def test_unreachable_s3_fails_no_save(on, server, agent_dir, s3, monkeypatch):
    """A save to memory succeeds while S3 is unreachable, and S3 is retried in the background."""
    away = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", away)
    monkeypatch.setenv("TIEREDCKPT_DURABLE_RETRY_S", "1")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={away},region=us-east-1")
    assert on(1, save_with_s3_away, "aws", server.url, away, s3) == ["SageMakerS3TierError"]
    assert on(1, save_with_s3_away, "ours", server.url, away, s3) == [(True, False)]
