"""Classes with AWS's names on this project's store: a script changes only one import."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import integration.sagemaker as ours
from integration.sagemaker import (
    SageMakerCheckpointConfig,
    SageMakerInMemoryTierError,
    SageMakerTieredStorageConfigError,
    SageMakerTieredStorageError,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from peerstore.errors import AgentUnreachableError
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import state_at
from tests.support.models import build_model, full_state, get_state, set_state, train_steps
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError
from tieredckpt.session.session import use_agent_factory

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]


def config(**more):
    return SageMakerCheckpointConfig(**{"namespace": "job", "world_size": 1, **more})


def save(state, step, of=None, **how):
    dcp.save(state, storage_writer=SageMakerTieredStorageWriter(of or config(), step=step), no_dist=True, **how)


def load(state, of=None, step=None, **how):
    reader = SageMakerTieredStorageReader(of or config(), step, **how)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


# -- names and arguments ---------------------------------------------------------------------------------------


def test_class_names_match_aws():
    theirs = pytest.importorskip("amzn_sagemaker_checkpointing.checkpointing.filesystem.exceptions")
    for name in ("SageMakerTieredStorageError", "SageMakerInMemoryTierError", "SageMakerS3TierError"):
        assert [kind.__name__ for kind in getattr(ours, name).__mro__ if "SageMaker" in kind.__name__] == [
            kind.__name__ for kind in getattr(theirs, name).__mro__ if "SageMaker" in kind.__name__
        ]


def test_class_arguments_match_aws():
    import dataclasses
    import inspect

    theirs = pytest.importorskip("amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config")
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
        SageMakerTieredStorageReader as Reader,
    )
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
        SageMakerTieredStorageWriter as Writer,
    )

    mine = [(field.name, field.default) for field in dataclasses.fields(SageMakerCheckpointConfig)]
    asked = [(field.name, field.default) for field in dataclasses.fields(theirs.SageMakerCheckpointConfig)]
    assert mine[: len(asked)] == asked
    for here, there in ((SageMakerTieredStorageWriter, Writer), (SageMakerTieredStorageReader, Reader)):
        wanted = inspect.signature(there).parameters
        has = inspect.signature(here).parameters
        assert [(name, has[name].default, has[name].kind) for name in wanted] == [
            (name, one.default, one.kind) for name, one in wanted.items()
        ]


def test_attributes_have_initial_values(tmp_path):
    writer = SageMakerTieredStorageWriter(config(s3_tier_base_path="s3://bucket/runs"), "runs/step_7/x")
    assert (writer.step, writer.in_memory_success, writer.s3_success) == (7, True, False)
    assert writer.s3_checkpoint_dir == "s3://bucket/runs/job/step-7"
    assert SageMakerTieredStorageWriter(config(), step=3).s3_checkpoint_dir is None
    assert SageMakerTieredStorageWriter.validate_checkpoint_id("anything")
    assert SageMakerTieredStorageReader(config(), step=3).step == 3


@pytest.mark.parametrize(
    ("step", "path", "found"),
    [(0, "", 0), (5, "step_9", 5), (-1, "step_0", 0), (-1, "a/step_12/b", 12), (-1, "step_1/step_2", 1)],
)
def test_the_step_is_given_or_in_the_path(step, path, found):
    assert SageMakerTieredStorageWriter(config(), path, step).step == found


@pytest.mark.parametrize(
    ("step", "path"), [(-1, ""), (-1, "x"), (-2, "step_3"), (-1, "step_"), (-1, "step_x"), (-1, "step_-4"), (True, "")]
)
def test_invalid_step_is_refused(step, path):
    with pytest.raises(SageMakerTieredStorageError, match="which step"):
        SageMakerTieredStorageWriter(config(), path, step)


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": ""},
        {"namespace": "../../etc"},
        {"namespace": "a/b"},
        {"namespace": "a b"},
        {"world_size": 0},
        {"world_size": -1},
        {"world_size": "2"},
        {"save_to_s3": True},
        {"s3_tier_base_path": "bucket/path"},
        {"s3_tier_base_path": "s3://"},
        {"save_to_disk": True},
    ],
)
@pytest.mark.parametrize("kind", [SageMakerTieredStorageReader, SageMakerTieredStorageWriter])
def test_a_wrong_configuration(wrong, kind):
    with pytest.raises(SageMakerTieredStorageConfigError):
        kind(config(**wrong), step=1)


def test_conflicting_s3_locations_are_refused():
    strategy = ours.DefaultS3PathStrategy("s3://b")
    with pytest.raises(ValueError, match="one of them"):
        config(s3_tier_base_path="s3://b", s3_path_strategy=strategy)
    assert config(s3_path_strategy=strategy).get_s3_strategy() is strategy
    assert config(s3_tier_base_path="s3://b").get_s3_strategy().get_s3_uri("n", 2, 5, "f") == "s3://b/n/rank_2/step_5/f"


# -- one process -----------------------------------------------------------------------------------------------


def test_saved_step_is_loaded(agent_dir):
    for step in (0, 3):
        save(state_at(step), step, of=config(world_size=8))  # this world size has no effect
    for asked, step in ((None, 3), (0, 0)):
        found = zeros_like_state(state_at(step))
        reader = load(found, of=config(world_size=2), step=asked)
        assert_same_bits(state_at(step), found)
        assert reader.step == step


def test_any_checkpoint_id_is_accepted(agent_dir):
    save(state_at(4), 4, checkpoint_id="s3://other/step_9")
    found = zeros_like_state(state_at(4))
    dcp.load(found, checkpoint_id="/somewhere", storage_reader=SageMakerTieredStorageReader(config()), no_dist=True)
    assert_same_bits(state_at(4), found)


def test_nothing_saved_is_absent(agent_dir):
    with pytest.raises(CheckpointException) as failed:
        load({"w": torch.zeros(2)})
    (error,) = {type(error) for error, _ in failed.value.failures.values()}
    assert issubclass(error, SageMakerTieredStorageError)
    assert issubclass(error, CheckpointNotFoundError)
    with pytest.raises(CheckpointException) as failed:
        load({"w": torch.zeros(2)}, step=5)
    assert all(isinstance(error, CheckpointNotFoundError) for error, _ in failed.value.failures.values())


def test_missing_agent_is_unreachable():
    """The constructors of both classes do not fail."""

    def nobody(settings, job):
        raise AgentUnreachableError("no agent answers")

    with use_agent_factory(nobody):
        writer, reader = SageMakerTieredStorageWriter(config(), step=1), SageMakerTieredStorageReader(config())
        for call in (
            lambda: dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True),
            lambda: dcp.load({"w": torch.ones(2)}, storage_reader=reader, no_dist=True),
        ):
            with pytest.raises(CheckpointException) as failed:
                call()
            (error,) = (error for error, _ in failed.value.failures.values())
            assert isinstance(error, SageMakerInMemoryTierError)
            assert isinstance(error, TierUnavailableError)
    assert not writer.in_memory_success


def test_disk_tier(agent_dir, tmp_path):
    """The disk is a working tier here; AWS's library ignores both fields."""
    of = config(disk_tier_base_path=str(tmp_path), save_to_disk=True)
    writer = SageMakerTieredStorageWriter(of, step=2)
    dcp.save({"w": torch.arange(5.0)}, storage_writer=writer, no_dist=True)
    writer.wait_for_s3(60)
    assert list(tmp_path.glob("job/manifests/*.manifest"))


# -- s3 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(moto, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={moto.endpoint},region=us-east-1")
    return "s3://checkpoints/compatible"


def keys(moto):
    with moto.client() as client:
        listed = client.list_objects_v2(Bucket="checkpoints", Prefix="compatible/")
        return [one["Key"] for one in listed.get("Contents", [])]


def test_save_to_s3_applies_to_each_save(agent_dir, bucket, moto):
    """One configuration, changed before some saves, as in AWS's examples."""
    of = config(s3_tier_base_path=bucket)
    writers = {}
    for step in range(4):
        of.save_to_s3 = step % 2 == 0
        writers[step] = SageMakerTieredStorageWriter(of, step=step)
        dcp.save(state_at(step), storage_writer=writers[step], no_dist=True)
        if of.save_to_s3:
            writers[step].wait_for_s3(60)
    assert [writer.s3_success for writer in writers.values()] == [True, False, True, False]
    assert all(writer.in_memory_success for writer in writers.values())
    durable = {int(key.split("/")[-1].split(".")[0]) for key in keys(moto) if key.endswith(".manifest")}
    assert durable == {0, 2}
    with pytest.raises(SageMakerTieredStorageConfigError, match="not saved with save_to_s3"):
        writers[1].wait_for_s3(1)


# -- several ranks ---------------------------------------------------------------------------------------------


def save_trained(kind, steps, how):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=1)
    train_steps(model, optimizer, steps)
    state = {**get_state(model, optimizer), "epoch": steps}
    writer = SageMakerTieredStorageWriter(config(world_size=dist.get_world_size()), step=steps)
    if how == "async":
        before = copy.deepcopy(full_state(state))
        future = dcp.async_save(state, storage_writer=writer)
        with torch.no_grad():  # must not affect the save
            for parameter in model.parameters():
                parameter.zero_()
        future.result()
        return before
    dcp.save(state, storage_writer=writer, use_collectives=how != "alone")
    assert writer.error is None
    return full_state(state)


def load_trained(kind):
    logging.getLogger("tieredckpt").setLevel(logging.ERROR)
    model, optimizer = build_model(kind, dist.get_world_size(), seed=2)
    train_steps(model, optimizer, 1)
    state = {**get_state(model, optimizer), "epoch": -1}
    reader = SageMakerTieredStorageReader(config(world_size=7))
    dcp.load(state, storage_reader=reader)
    set_state(model, optimizer, state)
    return reader.step, full_state({**get_state(model, optimizer), "epoch": state["epoch"]})


@pytest.mark.parametrize(
    ("kind", "before", "after", "how"),
    [("fsdp", 2, 1, "save"), ("fsdp", 2, 3, "async"), ("ddp", 2, 2, "save"), ("fsdp", 2, 2, "alone")],
)
def test_ranks_save_and_other_worlds_load(agent_dir, ranks, kind, before, after, how):
    saved = ranks.run(before, save_trained, kind, 3, how)[0]
    for step, found in ranks.run(after, load_trained, kind):
        assert step == 3
        assert_same_bits(saved, found)


def test_errors_pickle_and_keep_their_class():
    import pickle

    from integration.sagemaker import errors

    for kind in (errors.NoCheckpointError, errors.DamagedCheckpointError, errors.S3RefusedError):
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
    assert isinstance(errors.to_sagemaker_error(CheckpointDamagedError("x")), errors.DamagedCheckpointError)
