"""Ray's processes and a node agent, once for each module."""

import pytest

from tests.support.agents import agent_directory
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings


@pytest.fixture(scope="module")
def cluster():
    """Yield the directory of the node agent that the workers of a Ray cluster use."""
    from tests.support.ray_training import ray_cluster

    with pytest.MonkeyPatch.context() as patch, agent_directory() as directory:
        patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        patch.setenv("TIEREDCKPT_AGENT_BUDGET", "1GiB")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home directory
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # Ray takes one report in each interval
        session = open_session("begun", load_settings())
        session.agent.watch_agent()  # it runs until the last test ends
        with ray_cluster():
            yield directory
