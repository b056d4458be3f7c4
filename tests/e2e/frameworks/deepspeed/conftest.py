"""Processes that have imported DeepSpeed, and undisturbed runs to compare with."""

import os

import pytest

from tests.support.agents import agent_directory
from tests.support.zygote import Zygote

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def deepspeed_zygote():
    """Return a zygote for these tests only, because its first process imports DeepSpeed."""
    one = Zygote()
    yield one
    one.close()


@pytest.fixture(scope="session")
def undisturbed(deepspeed_zygote, tmp_path_factory):
    """Return the ranks of an undisturbed run, with a digest of the state after each step."""
    from tests.support.deepspeed_training import train

    with agent_directory() as directory:
        environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        folder = str(tmp_path_factory.mktemp("undisturbed"))
        return deepspeed_zygote.run_ranks(2, train, folder, environ={0: environ, 1: environ})
