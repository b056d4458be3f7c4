"""Processes that have imported Lightning, and an undisturbed run to compare with."""

import pytest

from tests.support.agents import agent_directory
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def lightning_zygote():
    """Return a zygote for these tests only, because its first process imports Lightning."""
    one = Zygote()
    yield one
    one.close()


@pytest.fixture(scope="session")
def undisturbed_run(lightning_zygote, tmp_path_factory):
    """Return the process of an undisturbed run, with losses by step and a digest of the state."""
    from tests.support.lightning_training import fit

    with agent_directory() as directory:
        environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        return lightning_zygote.run(fit, tmp_path_factory.mktemp("undisturbed"), environ=environ)
