"""The rank and node that a launcher assigns, in torchrun's variables."""

import pytest

from elastic.workers.launch_environment import assignment_from_environ


def told(rank, size, local, **more):
    return {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        **more,
    }


def nodes(environ):
    place = assignment_from_environ(environ)
    return place.node_rank, place.node_count


def test_node_count_follows_the_launcher():
    assert nodes(told(5, 8, 2, GROUP_RANK="2", GROUP_WORLD_SIZE="4")) == (2, 4)


def test_node_count_of_uneven_nodes_follows_the_launcher():
    """Two nodes with one rank each, and this one with six."""
    assert nodes(told(7, 8, 6, GROUP_RANK="2", GROUP_WORLD_SIZE="3")) == (2, 3)


def test_node_count_is_derived_from_the_ranks_by_default():
    assert nodes(told(5, 8, 2)) == (2, 4)
    assert nodes(told(0, 1, 1)) == (0, 1)


@pytest.mark.parametrize(
    ("group", "groups"),
    [
        ("5", "8"),  # the number of ranks, as some launchers count there
        ("2", "1"),
        ("0", "1"),  # one node, which has not all of the ranks
        ("4", "4"),
        ("-1", "4"),
        ("0", "0"),
    ],
)
def test_impossible_environment_is_ignored(group, groups):
    assert nodes(told(5, 8, 2, GROUP_RANK=group, GROUP_WORLD_SIZE=groups)) == (2, 4)
