"""Ray's processes and a node agent, once for each module."""

import pytest

from tests.support.agents import agent_directory


@pytest.fixture(scope="module")
def cluster():
    """Run a Ray cluster and a node agent that its workers find through the environment."""
    from tests.support.ray_training import ray_cluster

    with pytest.MonkeyPatch.context() as patch, agent_directory() as directory:
        patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        patch.setenv("TIEREDCKPT_AGENT_BUDGET", "1GiB")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home directory
        with ray_cluster():
            yield
