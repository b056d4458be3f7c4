"""Addresses of peers, and the quality of the path to them."""

import os
import socket

import pytest

from peerstore import network_addresses
from peerstore.errors import PeerUnreachableError, RequestError
from peerstore.network_addresses import (
    interface_address,
    interface_addresses,
    interface_with_address,
    join_address,
    link_speed_bytes_per_s,
    local_address_for,
    outbound_address,
    resolve_host,
    route_to,
    slow_path_warning,
    split_address,
)
from tests.support.channel_pairs import PATIENCE_S

HUNDRED_GBIT = 100e9 / 8


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node7:7070", "node7", 7070),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("[fd00::7]:65535", "fd00::7", 65535),
        ("[::]:0", "::", 0),
        (":7070", "", 7070),
    ],
)
def test_addresses_are_a_host_and_a_port(text, host, port):
    assert split_address(text) == (host, port)
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "node7", "7070", "node7:", "node7:x", "node7:65536", "node7:-1", "fd00::7:70", "a:\u0663"]
)
def test_invalid_address_is_refused_with_examples(text):
    with pytest.raises(RequestError, match=r"for example node7:7070, 10\.0\.0\.7:7070 or \[fd00::7\]:7070"):
        split_address(text)


def test_interfaces_are_known_by_name_and_by_address():
    assert interface_addresses("lo")[0] == "127.0.0.1"
    assert interface_addresses("10.1.2.3") == ["10.1.2.3"]
    assert interface_addresses("fd00:0::7") == ["fd00::7"]
    assert interface_with_address("127.0.0.1") == "lo"
    assert interface_with_address("203.0.113.77") is None
    assert interface_with_address("node7") is None
    assert interface_address("lo", socket.AF_INET) == "127.0.0.1"
    with pytest.raises(RequestError, match=r"no interface 'eth77' here, only .*lo"):
        interface_addresses("eth77")
    with pytest.raises(RequestError, match="no IPv6 address"):
        interface_address("10.1.2.3", socket.AF_INET6)


def test_route_to_a_peer_is_found_without_traffic():
    assert local_address_for("127.0.0.1:7070") == "127.0.0.1"
    assert route_to("127.0.0.1:7070") == ("lo", None)
    assert outbound_address()


def test_unknown_host_name_is_unreachable():
    with pytest.raises(PeerUnreachableError, match=r"cannot resolve 'nowhere\.invalid'"):
        resolve_host("nowhere.invalid", 1, within_s=PATIENCE_S)


def test_slow_name_service_is_not_awaited_beyond_the_deadline(monkeypatch):
    asked, answered = os.pipe()
    real = network_addresses._look_up

    def slow(host, port, flags):
        if not flags:
            os.read(asked, 1)
        return real(host, port, flags)

    monkeypatch.setattr(network_addresses, "_look_up", slow)
    try:
        with pytest.raises(PeerUnreachableError, match=r"'localhost' was not resolved within 0\.05 s"):
            resolve_host("localhost", 1, within_s=0.05)
    finally:
        os.write(answered, b"x")
    assert resolve_host("127.0.0.1", 1, within_s=0)[0][4] == ("127.0.0.1", 1)
    os.close(answered)
    os.close(asked)


@pytest.mark.parametrize(
    ("speed", "expected"),
    [("100000\n", HUNDRED_GBIT), ("1000", 125e6), ("-1\n", None), ("0", None), ("", None), ("fast", None)],
)
def test_link_speed_is_read_from_sysfs(tmp_path, speed, expected):
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "speed").write_text(speed)
    assert link_speed_bytes_per_s("eth0", tmp_path) == expected
    assert link_speed_bytes_per_s("eth1", tmp_path) is None


@pytest.mark.parametrize(
    ("measured", "link", "warned"),
    [
        (2e9, HUNDRED_GBIT, False),
        (1.25e9, HUNDRED_GBIT, False),
        (1.24e9, HUNDRED_GBIT, True),
        (0.0, HUNDRED_GBIT, True),
        (1e6, None, False),
        (110e6, 125e6, False),
    ],
)
def test_path_far_below_its_link_speed_warns(measured, link, warned):
    assert (slow_path_warning(measured, link) is not None) == warned


def test_slow_path_warning_has_numbers_and_advice():
    assert slow_path_warning(0.11e9, HUNDRED_GBIT, way="the way to n2") == (
        "the way to n2 moves 0.11 GB/s, 0.9% of what its link could (12.5 GB/s): is it the network that is meant "
        "for this? Name another interface, or look for what else uses this one"
    )
