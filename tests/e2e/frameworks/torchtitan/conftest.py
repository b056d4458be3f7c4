"""Processes that have imported torchtitan, and undisturbed runs to compare with."""

import pytest

from tests.support.agents import agent_directory
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def titan_zygote():
    """Return a zygote for these tests only, because its first process imports torchtitan."""
    one = Zygote()
    yield one
    one.close()


def run_undisturbed(zygote, folder, size):
    """Return the ranks of a run with torchtitan's own checkpoint manager."""
    from tests.support.torchtitan_training import train

    with agent_directory() as directory:
        environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        return zygote.run_ranks(size, train, str(folder), None, (), environ=dict.fromkeys(range(size), environ))


@pytest.fixture(scope="session")
def undisturbed_single(titan_zygote, tmp_path_factory):
    return run_undisturbed(titan_zygote, tmp_path_factory.mktemp("single"), 1)


@pytest.fixture(scope="session")
def undisturbed_pair(titan_zygote, tmp_path_factory):
    return run_undisturbed(titan_zygote, tmp_path_factory.mktemp("pair"), 2)


@pytest.fixture(params=["undisturbed_single", "undisturbed_pair"])
def undisturbed(request):
    return request.getfixturevalue(request.param)
