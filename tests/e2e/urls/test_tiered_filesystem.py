"""DCP's own file writer and reader on ``tiered://``, unmodified and without ``enable_urls()``."""

import gc
import io
import signal

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint.api import CheckpointException

from peerstore.shard_records import clock_ms
from tests.support.agents import agent_directory, stop_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tests.support.local_nodes import wait_until
from tests.support.models import build_model, full_state, get_state, set_state, train_steps
from tieredckpt.errors import SaveFailedError, UsageError
from tieredckpt.fsspec_view import tiered_filesystem
from tieredckpt.fsspec_view.file_space import StepFileSpace, parse_tiered_path
from tieredckpt.session.incarnation import use_world_epoch
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import DurableSettings, load_settings

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.e2e,
]


def save(step, value=None, job="job"):
    dcp.save(state_at(step if value is None else value), checkpoint_id=f"tiered://{job}/step-{step}", no_dist=True)


def load(step, value=None, job="job"):
    expected = state_at(step if value is None else value)
    found = zeros_like_state(expected)
    dcp.load(found, checkpoint_id=f"tiered://{job}/step-{step}", no_dist=True)
    assert_same_bits(expected, found)


@pytest.fixture
def durable(monkeypatch, tmp_path):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/durable")
    return DurableSettings(url=f"file://{tmp_path}/durable")


def wait_durable(job="job"):
    view = open_session(job, load_settings()).agent.wait_durable(job, None, 30)
    assert view.state == "done", view


def begun_epoch(directory, monkeypatch):
    """Return a new attempt's epoch on a node that knows only the first epoch of another arena."""
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
    space = StepFileSpace("job")
    assert space.session.agent.store.claim(space.space, "files-of-another-arena") == 1
    space.begin(3)
    return space._begun[3].version_id.epoch


def test_two_nodes_claim_different_epochs_which_carry_the_time(monkeypatch):
    began = clock_ms()
    with agent_directory() as first, agent_directory() as second:
        one = begun_epoch(first, monkeypatch)
        wait_until(lambda: clock_ms() > one)
        other = begun_epoch(second, monkeypatch)
    assert other > one > began


def test_attempt_claims_an_epoch_of_the_world_of_its_rank(agent_dir):
    allocated = clock_ms() + 5_000_000
    space = StepFileSpace("job")
    with use_world_epoch(allocated):
        space.begin(3)
    assert space._begun[3].version_id.epoch > allocated


def test_dcps_own_writer_is_used(agent_dir):
    assert type(_storage_utils._storage_setup(None, "tiered://job/step-1")).__name__ == "FsspecWriter"
    assert isinstance(fsspec.filesystem("tiered"), fsspec.AbstractFileSystem)
    assert not agent_dir.exists(), "no agent starts before a write"


def test_save_and_load(agent_dir):
    for step in (1, 2, 3):
        save(step)
    load(3)
    load(2)


def test_many_steps_do_not_fill_the_arena(agent_dir):
    for step in range(12):
        save(step)
    load(11)
    status = StepFileSpace("job").session.agent.store.status()
    assert status.arena.allocated_bytes < 64 << 20


def test_a_file_larger_than_its_first_slot(agent_dir):
    state = {"big": torch.arange(12 << 20, dtype=torch.int32), "small": torch.ones(3)}
    dcp.save(state, checkpoint_id="tiered://large/step-0", no_dist=True)
    found = zeros_like_state(state)
    dcp.load(found, checkpoint_id="tiered://large/step-0", no_dist=True)
    assert_same_bits(state, found)


def test_rewritten_step_has_the_new_content(agent_dir, durable):
    save(1, 10)
    wait_durable()
    save(1, 20)
    load(1, 20)
    wait_durable()
    CheckpointJob(agent_dir, durable, "job").lose_memory()
    load(1, 20)
    save(1, 30)
    load(1, 30)
    wait_durable()
    CheckpointJob(agent_dir, durable, "job").lose_memory()
    load(1, 30)


def test_step_survives_the_agent_and_the_node(agent_dir, durable):
    save(1)
    save(2)
    wait_durable()
    stop_agent(agent_dir, signal.SIGKILL)
    load(2)
    close_sessions()
    CheckpointJob(agent_dir, durable, "job").lose_memory()
    load(2)
    load(1)


def test_damage_is_found_and_never_loaded(agent_dir, durable, tmp_path):
    save(1)
    wait_durable()
    CheckpointJob(agent_dir, durable, "job").lose_memory()
    for path in (tmp_path / "durable" / "job" / "steps").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[4200] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointException) as failure:
        load(1)
    assert "CheckpointDamagedError" in repr(failure.value.failures) or "not what was saved" in str(failure.value)


class BreaksInTheMiddle:
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


def test_failed_save_leaves_the_step_unchanged(agent_dir):
    save(1)
    for _ in range(4):
        with pytest.raises(CheckpointException):
            dcp.save({**state_at(9), "z": BreaksInTheMiddle()}, checkpoint_id="tiered://job/step-1", no_dist=True)
    load(1)
    with pytest.raises(CheckpointException):
        load(2)
    save(1, 7)
    load(1, 7)


def write_and_die(say):
    from tieredckpt.fsspec_view.file_space import StepFileSpace

    space = StepFileSpace("job")
    space.begin(5)
    with space.writer(5, "__0_0.distcp") as file:
        file.write(b"x" * 100_000)
    open_file = space.writer(5, "__1_0.distcp")
    open_file.write(b"y" * 100)
    say("written")
    signal.pause()


def test_a_writer_killed_before_the_end(agent_dir, zygote):
    save(4)
    running = zygote.start(write_and_die)
    running.wait_line("written")
    running.kill()
    running.wait()
    with pytest.raises(CheckpointException):
        load(5)
    load(4)
    save(5)
    load(5)


def write_a_file(space, step, name="__0_0.distcp"):
    """Write one rank's file of a step that stays incomplete because another rank failed."""
    space.begin(step)
    with space.writer(step, name) as file:
        file.write(b"x" * 1000)


def test_unfinished_saves_release_their_slots(agent_dir):
    """Only the previous step may still be in flight."""

    def here():
        return {fact.key.version for fact in space.session.agent.store.list_shards(space.space)}

    space = StepFileSpace("job")
    for step in range(1, 8):
        write_a_file(space, step)
    assert here() == {6, 7}
    write_a_file(StepFileSpace("job"), 3, "__1_0.distcp")  # from another process that has rolled back
    assert here() == {7, 3}
    save(4)
    load(4)
    assert here() == {3}
    save(7)
    load(7)


def save_steps(count):
    for step in range(count):
        dcp.save({"x": torch.ones(3)}, checkpoint_id=f"tiered://many/step-{step}")
    (job,) = [job for (_, name), job in tiered_filesystem._jobs.items() if name == "many"]
    return len(job.writing._begun)


def test_a_rank_that_completes_no_step_remembers_no_more_of_them(agent_dir, ranks):
    assert max(ranks.run(2, save_steps, 6)) <= 2


def test_metadata_that_names_files_which_are_not_here_completes_nothing(agent_dir, monkeypatch):
    original = StepFileSpace.rename

    def forgetful(self, step, name, final):
        if final == ".metadata":
            store = self.session.agent.store
            store.versions.delete(self.space, [fact.key.version_id for fact in store.list_shards(self.space)])
        original(self, step, name, final)

    monkeypatch.setattr(StepFileSpace, "rename", forgetful)
    with pytest.raises(CheckpointException) as failure:
        save(1)
    error = failure.value.failures[0][0]
    assert isinstance(error, SaveFailedError)
    assert "__0_0.distcp" in str(error)
    assert "enable_urls" in str(error)


def save_and_load_two_ranks(url):
    world = dist.get_world_size()
    model, optimizer = build_model("fsdp", world, seed=1)
    train_steps(model, optimizer, 2)
    state = get_state(model, optimizer)
    for step in (1, 2, 2):
        dcp.save(state, checkpoint_id=f"tiered://fsdp/step-{step}")
    expected = full_state(state)
    other, optimizer = build_model("fsdp", world, seed=2)
    state = get_state(other, optimizer)
    dcp.load(state, checkpoint_id="tiered://fsdp/step-2")
    set_state(other, optimizer, state)
    assert_same_bits(expected, full_state(get_state(other, optimizer)))
    return fsspec.filesystem("tiered").ls("tiered://fsdp/step-2", detail=False)


def test_two_ranks(agent_dir, ranks, durable):
    files = ["fsdp/step-2/.metadata", "fsdp/step-2/__0_0.distcp"]
    assert ranks.run(2, save_and_load_two_ranks, durable.url) == [files, files]
    wait_durable("fsdp")
    assert ranks.run(1, load_one_rank) == [True]


def load_one_rank():
    model, optimizer = build_model("plain", 1, seed=3)
    state = get_state(model, optimizer)
    dcp.load(state, checkpoint_id="tiered://fsdp/step-2")
    return True


def test_async_save(agent_dir):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for step in range(3):
            dcp.async_save(state_at(step), checkpoint_id=f"tiered://job/step-{step}").result()
        found = zeros_like_state(state_at(2))
        dcp.load(found, checkpoint_id="tiered://job/step-2")
    finally:
        dist.destroy_process_group()
    assert_same_bits(state_at(2), found)


def test_steps_are_a_file_system(agent_dir, durable):
    fs = fsspec.filesystem("tiered")
    assert not fs.exists("tiered://job/step-1")
    save(1)
    save(2)
    assert fs.ls("tiered://job", detail=False) == ["job/step-1", "job/step-2"]
    assert fs.ls("tiered://job/step-2", detail=False) == ["job/step-2/.metadata", "job/step-2/__0_0.distcp"]
    assert fs.exists("tiered://job/step-2/.metadata")
    assert not fs.exists("tiered://job/step-2/other")
    assert not fs.exists("tiered://job/step-3/.metadata")
    assert fs.isdir("tiered://job/step-2")
    size = fs.info("tiered://job/step-2/__0_0.distcp")["size"]
    data = fs.cat_file("tiered://job/step-2/__0_0.distcp")
    assert len(data) == size
    with fs.open("tiered://job/step-2/__0_0.distcp") as file:
        file.seek(1000)
        assert file.read(77) == data[1000:1077]
        file.seek(-10, 2)
        assert file.read() == data[-10:]
    wait_durable()
    fs.rm("tiered://job/step-1", recursive=True)
    assert fs.ls("tiered://job", detail=False) == ["job/step-2"]
    with pytest.raises(io.UnsupportedOperation):
        fs.rm_file("tiered://job/step-2/__0_0.distcp")
    with pytest.raises(io.UnsupportedOperation):
        fs.open("tiered://job/step-2/x", "ab")
    assert fs.modified("tiered://job/step-2").year > 2000
    load(2)


def test_files_started_with_another_agent_are_absent(agent_dir, monkeypatch):
    fs = fsspec.filesystem("tiered")
    fs.makedirs("tiered://job/step-1")
    assert fs.exists("tiered://job/step-1")
    with agent_directory() as other:
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(other))
        assert not fs.exists("tiered://job/step-1")


def test_command_line_lists_file_system_steps(agent_dir, durable, capsys):
    import json

    from tieredckpt.cli import main

    save(3)
    wait_durable()
    assert main(["ls", "job", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["steps"]
    assert (line["step"], line["complete"], line["parts"], line["tiers"]) == (3, True, 1, ["memory", "durable"])
    assert line["copies"] == 2
    assert main(["ls", "--json"]) == 0
    assert [one["job"] for one in json.loads(capsys.readouterr().out)["jobs"]] == ["job"]
    assert main(["verify", "job", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checks"]) == 2


def test_save_without_collectives_is_refused_before_losing_a_step(agent_dir, ranks):
    assert ranks.run(2, save_without_collectives) == ["refused", "refused"]


def save_without_collectives():
    try:
        dcp.save({"x": torch.ones(3)}, checkpoint_id="tiered://job/step-1", use_collectives=False)
    except (UsageError, CheckpointException) as error:
        return "refused" if "enable_urls" in str(error) + repr(getattr(error, "failures", "")) else str(error)
    return "saved"


@pytest.mark.parametrize(
    "path", ["job/stop-1/.metadata", "../x", "job/step-1/../../x", "job//x", "job/a/__0_0.distcp", ""]
)
def test_invalid_paths_are_refused(path):
    with pytest.raises(UsageError):
        parse_tiered_path(path)
    assert not fsspec.filesystem("tiered").exists(path)


def test_a_file_that_was_not_closed_is_not_kept(agent_dir, caplog):
    tiered = fsspec.filesystem("tiered")
    with tiered.open("tiered://job/state.json", "wb") as file:
        file.write(b"all of it")
    file = tiered.open("tiered://job/state.json", "wb")
    file.write(b"all")
    del file
    gc.collect()
    assert tiered.cat_file("tiered://job/state.json") == b"all of it"
    assert "state.json of job was not closed, so that it is not kept" in caplog.text


def test_file_of_a_failed_write_is_not_sealed(agent_dir):
    tiered = fsspec.filesystem("tiered")
    with pytest.raises(TypeError), tiered.open("tiered://job/step-1/__0_0.distcp", "wb") as file:
        file.writelines([b"half of it", None])
    assert open_session(".job", load_settings()).agent.store.list_shards(".job") == []
