"""That a node was not reached is remembered for a while, and only of that node at that address."""

from hypothesis import given
from hypothesis import strategies as st

from peerstore.peers.peer_inventory import NegativeCache

TIMES = st.floats(0, 100, allow_nan=False)


@given(at=TIMES, later=st.floats(0, 30))
def test_it_is_remembered_for_so_long_and_no_longer(at, later):
    known = NegativeCache(10.0)
    known.put(at, "n1", "a:1", "nobody answers")
    now = at + later
    assert known.get(now, "n1", "a:1") == ("nobody answers" if now - at < 10.0 else "")
    assert known.get(now, "n2", "a:1") == ""


def test_nothing_is_remembered_of_another_address():
    known = NegativeCache(10.0)
    known.put(0.0, "n1", "a:1", "nobody answers")
    assert known.get(1.0, "n1", "b:1") == ""
    assert known.get(1.0, "n1", "a:1") == "", "it was another machine's"


def test_a_clock_that_goes_back_makes_nothing_younger():
    known = NegativeCache(10.0)
    known.put(50.0, "n1", "a:1", "nobody answers")
    assert known.get(49.0, "n1", "a:1") == ""


def test_who_is_heard_of_again_is_asked_again():
    known = NegativeCache(10.0)
    for node in ("n1", "n2"):
        known.put(0.0, node, "a:1", f"{node} does not answer")
    known.retain(lambda node: node == "n2")
    assert known.get(1.0, "n1", "a:1") == ""
    assert known.get(1.0, "n2", "a:1") == "n2 does not answer"
