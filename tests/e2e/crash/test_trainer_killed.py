"""SIGKILL of the trainer at every point of save, seal and load.

No restore returns a step older than the last acknowledged one, and training continues bit for bit.
"""

import hashlib
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.support.agents import agent_directory, agent_pid, stop_agent
from tests.support.bits import tensor_bytes
from tests.support.crashes import crash_environ
from tieredckpt import Checkpointer
from tieredckpt.cli import main

JOB = "tiered://killed"
STEPS = 6


def build_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    loss = (model(torch.randn(8, 64, generator=generator)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def state_of(model, optimizer):
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict()["state"],
        "groups": [g["lr"] for g in optimizer.param_groups],
    }


def digest(model, optimizer):
    total = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]:
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


def train(say, steps=STEPS, wait=True):
    """Run the README's loop, and report the restored step, every loss and every acknowledged step."""
    model, optimizer = build_model()
    train_step(model, optimizer, 10**6)  # creates the optimizer's state, so that the restore can fill it in place
    model.load_state_dict(build_model()[0].state_dict())
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    with Checkpointer(JOB) as ckpt:
        step = ckpt.restore(state_of(model, optimizer))
        say(f"restored {step}")
        for current in range(step + 1, steps):
            loss = train_step(model, optimizer, current)
            say(f"loss {current} {loss.item().hex()}")
            saved = ckpt.save(state_of(model, optimizer), current)
            if wait:
                saved.wait()
                say(f"sealed {current}")
    return digest(model, optimizer)


def losses_by_step(lines):
    found = {}
    for line in lines:
        if line.startswith("loss"):
            _, step, value = line.split()
            assert found.setdefault(int(step), value) == value
    return found


@pytest.fixture(scope="module")
def reference_run(zygote):
    with agent_directory() as directory:
        return zygote.run(
            train, environ={"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        )


def check_resumed(first, second, undisturbed):
    acknowledged = [int(line.split()[1]) for line in first.lines if line.startswith("sealed")]
    restored = int(second.lines[0].split()[1])
    assert restored >= max(acknowledged, default=-1)
    assert second.result == undisturbed.result
    reference = losses_by_step(undisturbed.lines)
    assert losses_by_step(first.lines).items() <= reference.items()
    assert losses_by_step(second.lines) == {step: reference[step] for step in range(restored + 1, STEPS)}


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("point", ["stage.leased", "stage.half", "stage.filled", "seal.written", "seal.asked"])
def test_trainer_killed_during_a_save_resumes(agent_dir, zygote, reference_run, point, count):
    first = zygote.run(train, environ=crash_environ(f"{point}:{count}"))
    assert first.status == -signal.SIGKILL
    second = zygote.run(train)
    check_resumed(first, second, reference_run)
    assert not list((agent_dir / "notes").glob("lease.*")), "the dead writer's slot was not freed"


@pytest.mark.parametrize("point", ["load.voted", "load.half", "load.done"])
def test_trainer_killed_during_a_load_resumes(agent_dir, zygote, reference_run, point):
    first = zygote.run(train, 3)
    killed = zygote.run(train, environ=crash_environ(point))
    assert killed.status == -signal.SIGKILL
    second = zygote.run(train)
    check_resumed(first, second, reference_run)


def save_two_steps(say, url):
    with Checkpointer(JOB, durable=url) as ckpt:
        for step in range(2):
            assert ckpt.save({"w": torch.full((1000,), float(step))}, step).wait("durable")


def restore_step(say, url, step=None):
    with Checkpointer(JOB, durable=url) as ckpt:
        return ckpt.restore({"w": torch.zeros(1000)}, step)


def restore_and_die(say, url):
    """Restore, reach a step that is not due for a save, and kill the process."""
    with Checkpointer(JOB, durable=url, every=100) as ckpt:
        say(f"restored {ckpt.restore({'w': torch.zeros(1000)})}")
        ckpt.save({"w": torch.ones(1000)}, 7)
        os.kill(os.getpid(), signal.SIGKILL)


def test_node_prefers_an_older_step_after_loads_that_crash(agent_dir, zygote, tmp_path):
    """Only this node prefers the older step, for a while, and only if the caller names no step.

    Other nodes are not affected, and the durable tier does not change.
    """
    url = f"file://{tmp_path}"
    zygote.run(save_two_steps, url)
    before = sorted(tmp_path.rglob("*"))
    for point in ["load.half", "load.done"] * 2:
        assert zygote.run(restore_step, url, environ=crash_environ(point)).status == -signal.SIGKILL
    assert zygote.run(restore_step, url).result == 1
    assert zygote.run(restore_step, url, environ=crash_environ("load.done")).status == -signal.SIGKILL
    assert zygote.run(restore_step, url).result == 0
    assert zygote.run(restore_step, url, 1).result == 1
    assert sorted(tmp_path.rglob("*")) == before
    with agent_directory() as other:
        assert zygote.run(restore_step, url, environ={"TIEREDCKPT_AGENT_DIRECTORY": str(other)}).result == 1
    assert main(["quarantine", "killed/step-1", "--lift"]) == 0
    assert zygote.run(restore_step, url).result == 1


def test_process_that_reaches_its_first_step_is_no_crashed_load(agent_dir, zygote, tmp_path):
    """If the step is lost after the first step, the load itself was good."""
    url = f"file://{tmp_path}"
    zygote.run(save_two_steps, url)
    for _ in range(7):
        killed = zygote.run(restore_and_die, url)
        assert (killed.status, killed.lines) == (-signal.SIGKILL, ["restored 1"])
    for _ in range(4):
        assert zygote.run(restore_step, url, environ=crash_environ("load.done")).status == -signal.SIGKILL
    assert zygote.run(restore_and_die, url).lines == ["restored 1"]
    assert zygote.run(restore_step, url, environ=crash_environ("load.done")).status == -signal.SIGKILL
    assert zygote.run(restore_step, url).result == 1, "a successful load proves that the step is loadable"


def test_trainer_and_agent_killed_together_at_any_time(agent_dir, zygote, reference_run):
    for point in ("stage.half", "seal.written", "seal.asked"):
        first = zygote.run(train, environ=crash_environ(f"{point}:2"))
        assert first.status == -signal.SIGKILL
        stop_agent(agent_dir, signal.SIGKILL)
        second = zygote.run(train)
        check_resumed(first, second, reference_run)
        stop_agent(agent_dir)
        for path in [*(agent_dir / "slots").iterdir(), *(agent_dir / "notes").iterdir()]:
            path.unlink()


def test_next_trainer_uses_the_surviving_agent(agent_dir, zygote):
    zygote.run(train, environ=crash_environ("seal.asked:2"))
    pid = agent_pid(agent_dir)
    assert pid is not None
    zygote.run(train)
    assert agent_pid(agent_dir) == pid


def test_repeatedly_killed_trainer_resumes(agent_dir, zygote, reference_run):
    """Every restart makes progress: each kill repeats at most one step."""
    lines, points = [], ["stage.half", "seal.asked", "load.half", "stage.filled", "seal.written", "load.done"]
    for number in range(30):
        ended = zygote.run(train, environ=crash_environ(f"{points[number % len(points)]}:{1 + number % 2}"))
        lines += ended.lines
        if ended.status == 0:
            break
    else:
        ended = zygote.run(train)
        lines += ended.lines
    assert ended.result == reference_run.result
    assert losses_by_step(lines) == losses_by_step(reference_run.lines)


def train_as_rank(say, steps):
    import torch.distributed as dist

    model, optimizer = build_model()
    train_step(model, optimizer, 10**6)
    model.load_state_dict(build_model()[0].state_dict())
    with Checkpointer(JOB) as ckpt:
        state = {"model": model.state_dict(), f"own{dist.get_rank()}": torch.zeros(1 << 16)}
        step = ckpt.restore(state)
        say(f"restored {step}")
        if step >= 0:
            assert float(state[f"own{dist.get_rank()}"][0]) == step
        for current in range(step + 1, steps):
            loss = train_step(model, optimizer, current)
            state[f"own{dist.get_rank()}"].fill_(current)
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:  # the other rank was killed, and the launcher is about to kill this one
                threading.Event().wait()
            say(f"loss {current} {loss.item().hex()}")
            ckpt.save(state, current).wait()
            say(f"sealed {current}")
    return step


@pytest.mark.parametrize("point", ["stage.half", "seal.asked"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_during_a_save_leaves_the_last_complete_step(agent_dir, zygote, point, victim):
    first = zygote.start_world(2, train_as_rank, 5, environ={victim: crash_environ(f"{point}:3")})
    assert first[victim].wait().status == -signal.SIGKILL
    first[1 - victim].kill()  # the launcher kills the others
    survivor = first[1 - victim].wait()
    acknowledged = [int(line.split()[1]) for line in survivor.lines if line.startswith("sealed")]
    second = [running.wait() for running in zygote.start_world(2, train_as_rank, 5)]
    restored = {ended.lines[0] for ended in second}
    assert len(restored) == 1, "the ranks restored different steps"
    assert int(restored.pop().split()[1]) in (max(acknowledged) - 1, max(acknowledged), max(acknowledged) + 1)


def test_every_crash_point_has_a_case():
    from peerstore.failpoints import FAILPOINTS

    text = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [point for point in FAILPOINTS if f'"{point}"' not in text] == []
