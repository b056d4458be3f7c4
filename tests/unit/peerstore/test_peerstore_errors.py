"""Errors on the wire."""

from peerstore import errors


def test_errors_cross_the_wire_by_name():
    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(known) > 10
    for kind in known:
        assert type(errors.error_from_wire(kind.__name__, "why")) is kind
    strange = errors.error_from_wire("OSError", "why")
    assert (type(strange), str(strange)) == (errors.PeerStoreError, "OSError: why")
