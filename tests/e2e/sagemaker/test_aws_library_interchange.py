"""AWS's own library and this one read each other's checkpoints bit for bit."""

import contextlib
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from integration.sagemaker import (
    DefaultS3PathStrategy,
    RayS3PathStrategy,
    SageMakerCheckpointConfig,
    SageMakerFormatWriter,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from integration.sagemaker.convert import main as convert
from integration.sagemaker.memory_service.http_frontend import TokenCheck
from tests.support import aws_library
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.memory_servers import our_server
from tests.support.memory_service import fake_memory_service
from tests.support.models import build_model, full_state, get_state, train_steps
from tieredckpt import TieredReader
from tieredckpt.errors import TierUnavailableError, UsageError

pytest.importorskip("amzn_sagemaker_checkpointing")
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]


@pytest.fixture
def service():
    with fake_memory_service() as running:
        yield running


@pytest.fixture
def s3(moto, monkeypatch, tmp_path):
    """Point both libraries to S3 with a prefix for this test."""
    for name, value in {
        "TIEREDCKPT_DURABLE_OPTIONS": f"endpoint={moto.endpoint},region=us-east-1",
        "AWS_ENDPOINT_URL": moto.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://checkpoints/{tmp_path.name}"


def trained(kind, steps):
    """Return a model's and optimizer's state, plus a view, a number and some text."""
    model, optimizer = build_model(kind, dist.get_world_size(), seed=1)
    train_steps(model, optimizer, steps)
    base = torch.arange(1000.0)
    return {**get_state(model, optimizer), "epoch": steps, "name": "run", "view": base[10:20]}


def by_aws(kind, steps, url, endpoint, s3_base, layout, how="save"):
    """Save with AWS's library, and return the full state of every rank."""
    aws_library.use_servers(url, endpoint)
    config, writer, _ = aws_library.library_classes()
    state = trained(kind, steps)
    of = config(namespace="job", world_size=dist.get_world_size(), save_to_s3=bool(s3_base), **_s3(s3_base, layout))
    made = writer(of, step=steps)
    if how == "async":
        dcp.async_save(state, storage_writer=made).result()
    else:
        dcp.save(state, storage_writer=made)
    return full_state(state)


def _s3(base, layout):
    if not base:
        return {}
    if layout == "default":
        return {"s3_tier_base_path": base}
    from amzn_sagemaker_checkpointing.config import s3_path_strategy

    return {"s3_path_strategy": s3_path_strategy.RayS3PathStrategy(base)}


def by_ours(kind, url, s3_base):
    """Load with this package's class of the same name, and return the step and the full state."""
    state = zeros_like_state(trained(kind, 1))
    of = SageMakerCheckpointConfig("job", dist.get_world_size(), s3_tier_base_path=s3_base, memory_url=url)
    reader = SageMakerTieredStorageReader(of)
    dcp.load(state, storage_reader=reader)
    return reader.step, full_state(state)


@pytest.mark.parametrize(
    ("where", "before", "kind", "after", "how"),
    [
        ("memory", 2, "fsdp", 3, "async"),
        pytest.param("default", 2, "fsdp", 1, "save", marks=pytest.mark.nightly),
        ("ray", 2, "ddp", 2, "save"),
    ],
)
def test_aws_checkpoint_is_read_by_any_world(agent_dir, ranks, service, moto, s3, where, before, kind, after, how):
    """A job loads AWS's memory blobs and both S3 layouts, and then continues with its own steps."""
    url, base = (service.url, "") if where == "memory" else ("", s3)
    saved = ranks.run(before, by_aws, kind, 2, service.url, moto.endpoint, base, where, how)[0]
    for step, found in ranks.run(after, by_ours, kind, url, base):
        assert step == 2
        assert_same_bits(saved, found)


# -- one process: other paths ---------------------------------------------------------------------------------


STATE = {"w": torch.arange(24.0).view(4, 6), "b": torch.linspace(-1, 1, 3).bfloat16(), "deep": {"n": 7, "t": (1, "a")}}


def save_by_aws(steps, url, endpoint, base, layout, more):
    aws_library.use_servers(url, endpoint)
    config, writer, _ = aws_library.library_classes()
    of = config(namespace="job", world_size=1, save_to_s3=bool(base), **_s3(base, layout))
    for step in steps:
        dcp.save({**shifted(step), **more}, storage_writer=writer(of, step=step))


@pytest.fixture
def aws_saves(ranks, service, moto):
    """Save with AWS's library in another process, because it leaves connections open."""

    def save(*steps, base="", layout="default", **more):
        ranks.run(1, save_by_aws, steps, service.url, moto.endpoint, base, layout, more)

    return save


def shifted(step):
    return {**STATE, "w": STATE["w"] + step}


def load(**more):
    how = {name: more.pop(name) for name in ("step", "trust_objects", "on_dtype_mismatch") if name in more}
    found = zeros_like_state(more.pop("state", STATE))
    reader = SageMakerTieredStorageReader(SageMakerCheckpointConfig("job", 1, **more), **how)
    dcp.load(found, storage_reader=reader, no_dist=True)
    return reader.step, found


def test_job_resumes_where_aws_library_stopped(agent_dir, service, aws_saves):
    aws_saves(5)
    step, found = load(memory_url=service.url)
    assert step == 5
    assert_same_bits(found, shifted(5))
    config = SageMakerCheckpointConfig("job", 1)
    dcp.save(shifted(6), storage_writer=SageMakerTieredStorageWriter(config, step=6), no_dist=True)
    step, found = load(memory_url=service.url)
    assert step == 6
    assert_same_bits(found, shifted(6))
    step, found = load(memory_url=service.url, step=5)
    assert_same_bits(found, shifted(5))


def test_our_step_is_loaded_when_the_other_store_is_unreachable(agent_dir, service):
    config = SageMakerCheckpointConfig("job", 1)
    dcp.save(shifted(6), storage_writer=SageMakerTieredStorageWriter(config, step=6), no_dist=True)
    service.broken = True
    assert load(memory_url=service.url)[0] == 6


def test_element_types_differ(agent_dir, service, aws_saves):
    """Both readers convert element types silently, ours unless ``on_dtype_mismatch`` is "error"."""
    aws_saves(1)
    other = {**STATE, "w": STATE["w"].double()}
    assert load(memory_url=service.url, state=other)[1]["w"].dtype == torch.float64
    with pytest.raises(CheckpointException, match="float32 was saved"):
        load(memory_url=service.url, state=other, on_dtype_mismatch="error")


class Settings:
    """An object that only its own class can load."""

    def __init__(self):
        self.rate = 0.1

    def __eq__(self, other):
        return isinstance(other, Settings) and self.rate == other.rate

    __hash__ = None


def test_objects_that_could_run_anything_are_refused(agent_dir, service, aws_saves):
    aws_saves(1, settings=Settings())
    state = {**STATE, "settings": 0}
    with pytest.raises(CheckpointException) as failed:
        load(memory_url=service.url, state=state)
    assert all(isinstance(error, UsageError) for error, _ in failed.value.failures.values())
    assert "trust_objects=True" in str(failed.value)
    _, found = load(memory_url=service.url, state=state, trust_objects=True)
    assert found["settings"] == Settings()


def read_by_aws(url, endpoint, base, layout):
    aws_library.use_servers(url, endpoint)
    config, _, reader = aws_library.library_classes()
    found = zeros_like_state(STATE)
    made = reader(config(namespace="back", world_size=1, **_s3(base, layout)))
    dcp.load(found, storage_reader=made)
    return made.step, found


@pytest.mark.parametrize("where", ["memory", "default", "ray"])
def test_step_written_in_aws_format_is_read_by_aws_library(ranks, service, moto, s3, where):
    layouts = {"default": DefaultS3PathStrategy, "ray": RayS3PathStrategy}
    if where == "memory":
        config = SageMakerCheckpointConfig("back", 1, memory_url=service.url)
    else:
        config = SageMakerCheckpointConfig("back", 1, s3_path_strategy=layouts[where](s3), save_to_s3=True)
    for step in (3, 4):
        dcp.save(shifted(step), storage_writer=SageMakerFormatWriter(config, step=step), no_dist=True)
    base = "" if where == "memory" else s3
    ((step, found),) = ranks.run(1, read_by_aws, service.url, moto.endpoint, base, where)
    assert step == 4
    assert_same_bits(found, shifted(4))


def test_our_memory_service_and_its_token(agent_dir):
    """A checkpoint written to this project's service in AWS's format is read with the token."""
    with our_server(access=TokenCheck(b"token-of-a-test")) as address:
        config = SageMakerCheckpointConfig("job", 1, memory_url=f"http://{address}", memory_token="token-of-a-test")
        dcp.save(shifted(3), storage_writer=SageMakerFormatWriter(config, step=3), no_dist=True)
        assert_same_bits(load(memory_url=f"http://any:token-of-a-test@{address}"), (3, shifted(3)))
        with pytest.raises(CheckpointException) as failed:
            load(memory_url=f"http://any:wrong@{address}")
    errors = [error for error, _ in failed.value.failures.values()]
    assert all(isinstance(error, TierUnavailableError) for error in errors)
    assert "wrong" not in str(errors)


def test_damage_inside_s3_falls_back_to_an_older_step(agent_dir, ranks, aws_saves, moto, s3):
    """Bytes in S3 change without a change of size; AWS's library does not check them."""
    aws_saves(1, 2, base=s3)
    bucket, _, prefix = s3.removeprefix("s3://").partition("/")
    key = f"{prefix}/job/rank_0/step_2/checkpoint.pt"
    with moto.client() as client:
        data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        at = data.index(shifted(2)["w"].numpy().tobytes())
        client.put_object(Bucket=bucket, Key=key, Body=data[:at] + b"?" + data[at + 1 :])
    step, found = load(s3_tier_base_path=s3)
    assert step == 1
    assert_same_bits(found, shifted(1))
    with pytest.raises(CheckpointException, match="not what was saved"):
        load(s3_tier_base_path=s3, step=2)


# -- the command ----------------------------------------------------------------------------------------------


def test_convert(agent_dir, service, aws_saves, s3, tmp_path, capsys):
    """From memory and from S3, into a durable tier and a plain folder, then verified and loaded."""
    aws_saves(1, 2, base=s3)
    sources = {f"{service.url}/job": 2, f"{s3}/job": 2, f"{s3}/job/step_1": 1}
    for number, (source, step) in enumerate(sources.items()):
        target = f"file://{tmp_path}/tier"
        assert convert([source, f"{target}/moved-{number}", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["step"], said["verified"], said["passed_over"]) == (step, True, [])
        found = zeros_like_state(STATE)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TIEREDCKPT_DURABLE_OPTIONS")
            dcp.load(found, storage_reader=TieredReader(f"moved-{number}", durable=target), no_dist=True)
        assert_same_bits(found, shifted(step))
    assert convert([f"{s3}/job", str(tmp_path / "plain")]) == 0
    found = zeros_like_state(STATE)
    dcp.load(found, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert_same_bits(found, shifted(2))


def test_convert_reports_skipped_steps_and_missing_checkpoints(service, aws_saves, tmp_path, capsys):
    aws_saves(1, 2)
    service.delete_shard("job", 0, 2)
    assert convert([f"{service.url}/job", f"file://{tmp_path}/tier/job", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == 1
    assert "rank 0" in said["passed_over"][0]
    assert convert([f"{service.url}/job/step_2", f"file://{tmp_path}/tier/other"]) == 4
    assert convert([f"{service.url}/nobody", f"file://{tmp_path}/tier/other"]) == 3
    service.broken = True
    assert convert([f"{service.url}/job", f"file://{tmp_path}/tier/other"]) == 5
    assert convert(["nonsense", f"file://{tmp_path}/tier/other"]) == 2
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "tier").glob("other/manifests/*"))


def test_convert_refuses_objects_that_run(service, aws_saves, tmp_path, capsys):
    aws_saves(1, settings=Settings())
    assert convert([f"{service.url}/job", f"file://{tmp_path}/tier/job"]) == 2
    assert "--trust-objects" in capsys.readouterr().err
    assert convert([f"{service.url}/job", f"file://{tmp_path}/tier/job", "--trust-objects"]) == 0
