"""Processes that have imported Lightning, and how to compare two runs of one training."""

import pytest

from tests.support.agents import agent_directory
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def lightning_zygote():
    """Forks processes for these tests only: the first one that it starts makes it import Lightning."""
    one = Zygote()
    yield one
    one.close()


@pytest.fixture(scope="session")
def undisturbed_run(lightning_zygote, tmp_path_factory):
    """Losses by step, and a digest of the final state."""
    from tests.support.lightning_training import fit

    with agent_directory() as directory:
        environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        return lightning_zygote.run(fit, tmp_path_factory.mktemp("undisturbed"), environ=environ)
