"""A failure to reach a node is cached for a while, for that node and address only."""

from hypothesis import given
from hypothesis import strategies as st

from peerstore.peers.peer_inventory import NegativeCache

TIMES = st.floats(0, 100, allow_nan=False)


@given(at=TIMES, later=st.floats(0, 30))
def test_entry_expires_after_its_time(at, later):
    known = NegativeCache(10.0)
    known.put(at, "n1", "a:1", "nobody answers")
    now = at + later
    assert known.get(now, "n1", "a:1") == ("nobody answers" if now - at < 10.0 else "")
    assert known.get(now, "n2", "a:1") == ""


def test_entry_does_not_apply_to_another_address():
    known = NegativeCache(10.0)
    known.put(0.0, "n1", "a:1", "nobody answers")
    assert known.get(1.0, "n1", "b:1") == ""
    assert known.get(1.0, "n1", "a:1") == "", "it was another machine's"


def test_clock_set_back_does_not_extend_an_entry():
    known = NegativeCache(10.0)
    known.put(50.0, "n1", "a:1", "nobody answers")
    assert known.get(49.0, "n1", "a:1") == ""


def test_message_from_the_node_removes_its_entry():
    known = NegativeCache(10.0)
    for node in ("n1", "n2"):
        known.put(0.0, node, "a:1", f"{node} does not answer")
    known.retain(lambda node: node == "n2")
    assert known.get(1.0, "n1", "a:1") == ""
    assert known.get(1.0, "n2", "a:1") == "n2 does not answer"
