"""Lightning's Trainer on two ranks: DDP, sharded, SIGTERM to one rank, resizes, incomplete steps."""

import os
import signal
from functools import partial

import pytest

pytest.importorskip("lightning", reason="PyTorch Lightning is not installed (pip install tieredckpt[lightning])")
pytest.importorskip("torchdata", reason="torchdata is not installed: its loader resumes within an epoch")

from integration.lightning import export_lightning_checkpoint
from tests.support.agents import agent_directory
from tests.support.crashes import crash_environ
from tests.support.lightning_training import BATCHES, URL, as_rank, digest

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]
STEPS = 2 * BATCHES
KINDS = ["plugin", "sharded"]


def terminate_rank_one(step):
    own = {step: partial(os.kill, os.getpid(), signal.SIGTERM)}  # during the next step
    return own if os.environ["RANK"] == "1" else {}


def losses_by_step(lines):
    return {int(line.split()[1]): line.split()[2] for line in lines if line.startswith("loss")}


def digest_and_step(trainer):
    return digest(trainer), trainer.global_step


@pytest.fixture(scope="module")
def references(lightning_zygote, tmp_path_factory):
    """Return a function that runs two undisturbed ranks once per strategy."""
    found = {}

    def run(kind):
        if kind not in found:
            with agent_directory() as directory, pytest.MonkeyPatch.context() as patch:
                patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
                patch.setenv("TIEREDCKPT_AGENT_BUDGET", "1GiB")
                ranks = lightning_zygote.start_world(2, partial(as_rank, strategy=kind), tmp_path_factory.mktemp(kind))
                found[kind] = [one.wait() for one in ranks]
        return found[kind]

    return run


@pytest.mark.parametrize("kind", [pytest.param("plugin", marks=pytest.mark.nightly), "sharded"])
def test_sigterm_on_one_rank_stops_all_ranks_at_the_same_step(agent_dir, lightning_zygote, references, tmp_path, kind):
    told = partial(as_rank, strategy=kind, every=100, at=partial(terminate_rank_one, 3))  # during step 4
    first = [one.wait() for one in lightning_zygote.start_world(2, told, tmp_path)]
    assert [one.result for one in first] == [128 + signal.SIGTERM] * 2
    second = [one.wait() for one in lightning_zygote.start_world(2, partial(as_rank, strategy=kind), tmp_path)]
    for before, after, whole in zip(first, second, references(kind), strict=True):
        reference = losses_by_step(whole.lines)
        assert losses_by_step(after.lines) == {step: reference[step] for step in range(5, STEPS + 1)}
        assert losses_by_step(before.lines).items() <= reference.items()
        assert after.result == whole.result


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_rank_killed_during_a_save_leaves_the_step_before(agent_dir, lightning_zygote, references, tmp_path, victim):
    sharded = partial(as_rank, strategy="sharded")
    killed = {victim: crash_environ("stage.half:3")}
    first = lightning_zygote.start_world(2, sharded, tmp_path, environ=killed)
    torn = first[victim].wait()
    assert torn.status == -signal.SIGKILL
    first[1 - victim].kill()
    first[1 - victim].wait(may_fail=True)  # its collectives fail, if that is noticed before it is killed
    last = len(torn.lines)  # the other rank may have been sealing this step when it was killed
    second = [one.wait() for one in lightning_zygote.start_world(2, sharded, tmp_path)]
    begun = {min(losses_by_step(one.lines)) for one in second}
    assert len(begun) == 1
    assert begun <= {last, last + 1}
    for after, whole in zip(second, references("sharded"), strict=True):
        assert losses_by_step(after.lines).items() <= losses_by_step(whole.lines).items()
        assert after.result == whole.result


@pytest.mark.parametrize(("kind", "ranks"), [pytest.param("plugin", 1, marks=pytest.mark.nightly), ("sharded", 1)])
def test_other_number_of_ranks_resumes_the_same_state(agent_dir, lightning_zygote, tmp_path, kind, ranks):
    how = {"strategy": kind, "epochs": 1}
    first = [one.wait() for one in lightning_zygote.start_world(2, partial(as_rank, **how), tmp_path)]
    resume = partial(as_rank, **how, inspect=digest_and_step)
    second = [one.wait() for one in lightning_zygote.start_world(ranks, resume, tmp_path)]
    assert second[0].result == (first[0].result, BATCHES)
    assert second[0].lines == []


def test_rank_zero_saves_alone_on_several_nodes(agent_dir, lightning_zygote, tmp_path):
    """Only rank 0 saves, although the nodes of a job usually exchange their addresses in a save."""
    how = {"nodes": 2, "epochs": 1}
    first = [one.wait() for one in lightning_zygote.start_world(2, partial(as_rank, **how), tmp_path)]
    resume = partial(as_rank, **how, inspect=digest_and_step)
    second = [one.wait() for one in lightning_zygote.start_world(2, resume, tmp_path)]
    assert second[0].result == (first[0].result, BATCHES)


def test_exported_folder_continues_without_this_project(agent_dir, lightning_zygote, tmp_path):
    def run(**how):
        ranks = lightning_zygote.start_world(2, partial(as_rank, every=None, **how), tmp_path)
        return [(one.result, one.lines) for one in [one.wait() for one in ranks]]

    for one in lightning_zygote.start_world(2, partial(as_rank, strategy="sharded", epochs=1), tmp_path):
        one.wait()
    folder = tmp_path / "exported.ckpt"
    export_lightning_checkpoint(URL, folder)
    ours, theirs = run(strategy="sharded"), run(strategy="lightning", ckpt_path=str(folder))
    assert ours == theirs
    assert [len(lines) for _, lines in theirs] == [BATCHES, BATCHES]
