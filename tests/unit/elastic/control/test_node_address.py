"""Addresses of this machine that other machines can reach."""

from __future__ import annotations

import socket

import pytest

from elastic.control import node_address
from peerstore import network_addresses
from peerstore.errors import PeerUnreachableError


@pytest.fixture
def known(monkeypatch):
    """Addresses by name on this machine; a list gives one address for each lookup."""
    names = {}

    def look_up(host, port, *_args, flags=0, **_more):
        found = host if flags else names.get(host, host)
        found = found.pop(0) if isinstance(found, list) else found
        if not found.replace(".", "").isdigit():
            raise socket.gaierror(f"no such name: {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port))]

    monkeypatch.setattr(network_addresses.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(node_address, "_RETRY_S", 0.0)
    return names


def test_loopback_name_is_replaced_by_the_outbound_address(known):
    known["me"] = "127.0.1.1"
    assert node_address.resolves_to_loopback("me:7400")
    assert not node_address.resolves_to_loopback("127.0.0.1:7400")
    assert node_address.node_address("me:7400") == network_addresses.outbound_address()
    known["other"] = "127.0.0.1"  # the interface that leads to that host decides
    assert node_address.node_address("me:7400", ["other"]) == "127.0.0.1"
    assert node_address.node_address("me:7400", ["nobody"]) == network_addresses.outbound_address()


def test_ip_address_is_used_unchanged(known):
    assert node_address.node_address("127.0.0.1:7400") == "127.0.0.1"
    assert node_address.node_address("") == "127.0.0.1"


def test_unresolved_name_is_retried(known):
    known["pod"] = ["nothing", "nothing", "10.0.0.1"]
    node_address.wait_for_name("pod:1", 60.0)
    with pytest.raises(PeerUnreachableError, match=r"'nobody'.*gave up after 0 s.*--coordinator HOST:PORT"):
        node_address.wait_for_name("nobody:1", 0.0)


@pytest.mark.parametrize(
    ("own", "expected"), [("127.0.1.1", "the interface"), ("10.0.0.7", None), ("unknown", "the interface")]
)
def test_gloo_gets_an_interface_only_when_it_cannot_find_it(known, monkeypatch, own, expected):
    monkeypatch.setattr(node_address, "interface_with_address", {"10.0.0.7": "the interface"}.get)
    known[socket.gethostname()] = own
    assert node_address.gloo_interface("10.0.0.7") == expected
    assert node_address.gloo_interface("127.0.0.1") == "lo"
