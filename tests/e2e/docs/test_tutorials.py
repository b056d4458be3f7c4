"""Every command of a tutorial prints what its page shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.agents import agent_directory, stop_agent
from tests.support.doc_pages import DocPage, assert_printed
from tieredckpt.cli.exit_codes import ExitCode

pytestmark = pytest.mark.e2e
SLEEP = "time.sleep(0.5)  # stands for the work of a real step"


def test_one_machine(tmp_path):
    with agent_directory() as agent:
        page = DocPage(
            "tutorials/one-machine.md",
            tmp_path,
            paths={
                "/tmp/tutorial": str(tmp_path / "durable"),
                "/dev/shm/tieredckpt-{os.getuid()}": str(agent),
                "/dev/shm/tieredckpt-1000": str(agent),
            },
            TIEREDCKPT_AGENT_DIRECTORY=str(agent),
            TIEREDCKPT_AGENT_NODE="vm",
        )
        script = page.block("import time\n")
        assert SLEEP in script
        saved = 'ckpt.wait("durable" if step % 5 == 0 else "memory")'
        killed = f"{saved}; step == 7 and __import__('os').kill(__import__('os').getpid(), 9)"
        (tmp_path / "train.py").write_text(script.replace(SLEEP, killed))
        killed_run = page.block("starting at step 0\n")
        assert_printed(killed_run.removesuffix("Killed\n"), page.run("exec python train.py", status=-9))
        page.check_session("tieredckpt ls tutorial")
        page.check_session("tieredckpt status tutorial")

        (tmp_path / "train.py").write_text(script.replace(SLEEP, saved))
        page.check_session("python train.py")

        damage = page.block("python - <<'END'\n")
        assert_printed(page.block("tutorial/19 part 0 ")[:-1] + "\n...\n", page.run(damage))
        page.run(damage.replace("newest = max(", "newest = min(").removesuffix("python train.py\n"))
        page.check_session("tieredckpt verify tutorial", status=ExitCode.DAMAGED)

        assert_printed("...\n" + page.block("IF THIS IS LOST "), page.run("tieredckpt doctor"))
        page.check_session("tieredckpt export tutorial model.safetensors")
        page.run(page.block("tieredckpt rm tutorial ").replace("rm tutorial ", "rm tutorial --yes "))
        assert not list((agent / "slots").iterdir())


@contextlib.contextmanager
def directories_of_two_nodes() -> Iterator[str]:
    """Yield the path that, with the number of a node, is the directory of its agent."""
    with agent_directory() as folder:
        try:
            yield f"{folder}/n"
        finally:
            for node in (0, 1):
                stop_agent(folder / f"n{node}")


@pytest.mark.nightly
def test_torchrun(tmp_path):
    with agent_directory() as agent, directories_of_two_nodes() as nodes:
        page = DocPage(
            "tutorials/torchrun.md",
            tmp_path,
            paths={"/dev/shm/tutorial-n": nodes},
            TIEREDCKPT_AGENT_DIRECTORY=str(agent),
            TIEREDCKPT_AGENT_BURST_SLOTS="0",
            TIEREDCKPT_MEMORY_ON_BUSY="wait",
            OMP_NUM_THREADS="1",
        )
        script = page.block("import time\n")
        assert SLEEP in script
        (tmp_path / "fsdp.py").write_text(script.replace(SLEEP, "ckpt.wait()"))
        page.check_session("torchrun --nproc-per-node 2 fsdp.py")
        page.check_session("torchrun --nproc-per-node 3 fsdp.py")
        page.check_session("tieredckpt inspect tutorial-fsdp")
        two = page.block("sed s/")
        page.run(two)
        page.check_session(f"tieredckpt status tutorial-two --cluster --agent-dir {nodes}0")
        page.check_session(f"tieredckpt whatif tutorial-two --lose node:n1 --agent-dir {nodes}0")
        page.run(page.block("kill -9 "))
        assert page.block("2 ranks trained steps 10 to 19") in page.run(two)
        page.run(page.block("for n in 0 1; do tieredckpt agent stop").replace("rm tutorial", "rm --yes tutorial"))
