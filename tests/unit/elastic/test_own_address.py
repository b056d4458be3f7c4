"""Names of machines, as they are looked up on one that others are to reach."""

from __future__ import annotations

import socket

import pytest

from elastic.control import own_address
from peerstore.errors import PeerUnreachableError
from peerstore.transport import addresses


@pytest.fixture
def known(monkeypatch):
    """What this machine finds under which name; a list is found one after the other."""
    names = {}

    def look_up(host, port, *_args, flags=0, **_more):
        found = host if flags else names.get(host, host)
        found = found.pop(0) if isinstance(found, list) else found
        if not found.replace(".", "").isdigit():
            raise socket.gaierror(f"no such name: {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(own_address, "_AGAIN_S", 0.0)
    return names


def test_a_name_that_leads_back_is_given_to_nobody(known):
    known["me"] = "127.0.1.1"
    assert own_address.leads_back("me:7400")
    assert not own_address.leads_back("127.0.0.1:7400")
    assert own_address.own_address("me:7400") == addresses.outward_address()
    known["other"] = "127.0.0.1"  # what leads there decides
    assert own_address.own_address("me:7400", ["other"]) == "127.0.0.1"
    assert own_address.own_address("me:7400", ["nobody"]) == addresses.outward_address()


def test_an_address_is_taken_as_it_is(known):
    assert own_address.own_address("127.0.0.1:7400") == "127.0.0.1"
    assert own_address.own_address("") == "127.0.0.1"


def test_a_name_that_is_not_known_yet_is_asked_for_again(known):
    known["pod"] = ["nothing", "nothing", "10.0.0.1"]
    own_address.wait_known("pod:1", 60.0)
    with pytest.raises(PeerUnreachableError, match=r"'nobody'.*asked for 0 s.*--coordinator HOST:PORT"):
        own_address.wait_known("nobody:1", 0.0)


@pytest.mark.parametrize(
    ("own", "expected"), [("127.0.1.1", "the interface"), ("10.0.0.7", None), ("unknown", "the interface")]
)
def test_gloo_is_told_where_to_listen_only_where_it_would_not_find_it(known, monkeypatch, own, expected):
    monkeypatch.setattr(own_address, "interface_of", {"10.0.0.7": "the interface"}.get)
    known[socket.gethostname()] = own
    assert own_address.gloo_interface("10.0.0.7") == expected
    assert own_address.gloo_interface("127.0.0.1") == "lo"
