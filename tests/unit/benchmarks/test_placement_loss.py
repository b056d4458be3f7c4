"""Data loss of placements when several nodes or racks fail, against closed forms and all cases."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import placement_loss
from benchmarks.placement_loss import (
    as_markdown,
    domains_lost,
    main,
    nodes_lost,
    scattered,
    scattered_domains,
    table,
)
from peerstore.errors import RequestError
from peerstore.membership.topology import NodeId, PeerNode, failure_domains
from peerstore.replication.replica_placement import ReplicaPlacement, place_replicas

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "placement.md"
untimed = settings(deadline=None)  # machines that run tests are busy


def racks(*sizes, tag="", memory=(0,)):
    spots = [(rack, index) for rack, size in enumerate(sizes) for index in range(size)]
    return [
        PeerNode(NodeId(f"n{rack}-{index}{tag}"), "", (("rack", f"r{rack}"),), memory[i % len(memory)])
        for i, (rack, index) in enumerate(spots)
    ]


def by_every_case(copysets, everything, lost):
    cases = [set(failed) for failed in itertools.combinations(everything, lost)]
    return sum(any(copyset <= failed for copyset in copysets) for failed in cases) / len(cases)


@untimed
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 10**6).map(str),
    st.sampled_from([(0,), (1, 4), (1, 1, 8)]),
)
def test_counting_agrees_with_trying_every_case(sizes, copies, tag, memory):
    nodes = racks(*sizes, tag=tag, memory=memory)
    placement = place_replicas(nodes, copies=copies)
    for lost in range(min(5, len(nodes)) + 1):
        expected = by_every_case(placement.copysets(), placement.partners, lost)
        assert nodes_lost(placement, lost).probability == pytest.approx(expected, abs=1e-12)
    domain = failure_domains(nodes, ("rack",)).innermost
    fatal = [{domain[node] for node in copyset} for copyset in placement.copysets()]
    for lost in range(len(sizes) + 1):
        expected = by_every_case(fatal, set(domain.values()), lost)
        assert domains_lost(placement, nodes, lost, levels=("rack",)).probability == pytest.approx(expected, abs=1e-12)


@given(st.sets(st.frozensets(st.integers(0, 7), min_size=1, max_size=4), max_size=8), st.integers(0, 10))
def test_any_fatal_sets_are_counted(fatal, lost):
    cases = itertools.combinations(range(10), lost)
    harmless = sum(not any(members <= set(case) for members in fatal) for case in cases)
    assert placement_loss.harmless(frozenset(fatal), 10, lost) == harmless


def mirror_pairs(nodes, lost):
    """Return the closed form for nodes in mirrored pairs: data survives if no pair fails entirely."""
    return 1 - math.comb(nodes // 2, lost) * 2**lost / math.comb(nodes, lost)


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 8, 16, 64, 65])
def test_pair_loss_probability_matches_the_closed_form(lost):
    placement = place_replicas(racks(*[8] * 16))
    assert nodes_lost(placement, lost).probability == pytest.approx(mirror_pairs(128, lost), abs=1e-12)
    assert nodes_lost(placement, lost).error == 0


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 8])
def test_paired_racks_lose_as_pairs_of_nodes_do(lost):
    nodes = racks(*[8] * 16)
    assert domains_lost(place_replicas(nodes), nodes, lost).probability == pytest.approx(
        mirror_pairs(16, lost), abs=1e-12
    )


@pytest.mark.parametrize(("copies", "lost"), [(1, 1), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (3, 4)])
def test_scattered_is_the_mean_over_every_placement(copies, lost):
    nodes = range(4)
    choices = [list(itertools.combinations([other for other in nodes if other != node], copies - 1)) for node in nodes]
    found = [
        by_every_case([{node, *partners} for node, partners in zip(nodes, chosen, strict=True)], nodes, lost)
        for chosen in itertools.product(*choices)
    ]
    assert scattered(4, lost, copies=copies) == pytest.approx(sum(found) / len(found))


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_scattered_racks_are_the_mean_over_every_placement(lost):
    nodes = [(rack, index) for rack in range(3) for index in range(2)]
    choices = [[rack for rack in range(3) if rack != node[0]] for node in nodes]
    found = [
        by_every_case([{node[0], rack} for node, rack in zip(nodes, chosen, strict=True)], range(3), lost)
        for chosen in itertools.product(*choices)
    ]
    assert scattered_domains(3, 2, lost, copies=2) == pytest.approx(sum(found) / len(found))


def test_two_lost_racks_lose_data_15_times_less_often_than_scattered():
    row = next(row for row in table(512, 16, copies=2) if (row.what, row.lost) == ("racks", 2))
    assert row.ours.probability == pytest.approx(1 / 15)
    assert 14.5 < row.scattered / row.ours.probability < 15.5


def test_intractable_placement_is_sampled_within_its_stated_error(monkeypatch):
    placement = place_replicas(racks(*[8] * 16))
    monkeypatch.setattr(placement_loss, "_WORK", 0)
    found = nodes_lost(placement, 8)
    assert 0 < found.error < 0.01
    assert found.probability == pytest.approx(mirror_pairs(128, 8), abs=found.error)
    assert nodes_lost(placement, 8) == found
    assert nodes_lost(placement, 8, seed=1) != found


def test_a_placement_that_really_is_tangled():
    count = 400
    names = [NodeId(f"n{i}") for i in range(count)]
    placement = ReplicaPlacement(
        {names[i]: (names[(i * 7 + 3) % count], names[(i * i + 11) % count]) for i in range(count)}
    )
    found = nodes_lost(placement, 40)
    assert found.error > 0
    smallest = min(map(len, placement.copysets()))
    exact = sum(len(copyset) == smallest for copyset in placement.copysets()) / math.comb(count, smallest)
    assert nodes_lost(placement, smallest).probability == pytest.approx(exact)
    assert nodes_lost(placement, smallest).error == 0


def test_more_than_there_are_cannot_fail():
    with pytest.raises(RequestError, match="5 of 4"):
        nodes_lost(place_replicas(racks(2, 2)), 5)


@pytest.mark.parametrize(("nodes", "count", "copies"), [(10, 3, 2), (4, 0, 2), (8, 2, 3)])
def test_a_table_of_racks_that_cannot_be(nodes, count, copies):
    with pytest.raises(RequestError, match="racks"):
        table(nodes, count, copies=copies)
    with pytest.raises(SystemExit):
        main(["--nodes", str(nodes), "--racks", str(count), "--copies", str(copies)])


@pytest.mark.parametrize("chosen", ["--nodes 128 --racks 16 --copies 2", "--nodes 128 --racks 16 --copies 3"])
def test_documented_tables_match_the_command_output(chosen, capsys):
    main(chosen.split())
    printed = capsys.readouterr().out.strip()
    assert f"    python -m benchmarks.placement_loss {chosen}\n\n{printed}\n" in PAGE.read_text(encoding="utf-8")


def test_the_command():
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.placement_loss", "--nodes", "12", "--racks", "4"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == as_markdown(table(12, 4, copies=2))
