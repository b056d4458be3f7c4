"""A restore that finds steps of a newer format raises; it does not start fresh."""

import contextlib

import msgspec
import pytest

from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_metadata import METADATA_FORMAT
from tests.support.agents import agent_directory
from tests.support.bits import zeros_like_state
from tests.support.jobs import in_process_agent, state_at
from tieredckpt import Checkpointer
from tieredckpt.errors import FormatVersionError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def directory():
    with agent_directory() as place:
        yield place


@contextlib.contextmanager
def opened(directory):
    store = NodeStore(TmpfsArena(directory), StoreSettings(budget="1GiB"))
    with in_process_agent(store), Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        yield ckpt


def save(directory, *steps):
    with opened(directory) as ckpt:
        for step in steps:
            assert ckpt.save(state_at(step), step).wait("sealed")


def write_newer_format(directory, *steps, kinds=("seal", "job")):
    arena = TmpfsArena(directory)
    for place in (directory / "notes").iterdir():
        if place.name.startswith(kinds):
            note = msgspec.msgpack.decode(arena.get_metadata(place.name))
            if "record" not in note or note["record"]["key"]["version"] in steps:
                arena.put_metadata(place.name, msgspec.msgpack.encode({**note, "format": METADATA_FORMAT + 1}))
    arena.close()


MESSAGE = rf"step.* 2 of job 'job'.*format {METADATA_FORMAT + 1}.*newest format.* {METADATA_FORMAT}\. Install a newer"


@pytest.mark.parametrize("kinds", [("seal",), ("seal", "job")])
def test_restore_names_steps_of_a_newer_format(directory, kinds):
    save(directory, 1, 2)
    write_newer_format(directory, 1, 2, kinds=kinds)
    with opened(directory) as ckpt:
        for on_lost in ("raise", "start_fresh"):
            with pytest.raises(FormatVersionError, match=MESSAGE):
                ckpt.restore(zeros_like_state(state_at(0)), on_lost=on_lost)


def test_restore_of_an_older_step_reports_newer_ones_of_a_newer_format(directory):
    save(directory, 1, 2)
    write_newer_format(directory, 2)
    with opened(directory) as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) == 1
        assert f"format {METADATA_FORMAT + 1}" in ckpt.last_restore.refused[0]
        with pytest.raises(FormatVersionError, match=MESSAGE):
            ckpt.restore(zeros_like_state(state_at(0)), 2)


def test_restore_ignores_steps_of_a_newer_format_that_the_job_has_passed(directory):
    save(directory, 1, 2)
    write_newer_format(directory, 1, kinds=("seal",))
    with opened(directory) as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) == 2
        assert ckpt.last_restore.refused == ()
