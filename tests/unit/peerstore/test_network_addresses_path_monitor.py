"""One warning for a path whose measured transfers are far below the speed of its link."""

from __future__ import annotations

import logging

import pytest

from peerstore.errors import PeerUnreachableError
from peerstore.network_addresses import PathMonitor

MIB = 1 << 20
LINK = 12.5e9
"""100 Gbit/s."""


def paths(link=LINK):
    return PathMonitor(link=lambda _address: ("eth0", link))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_slow_path_warns_once_with_node_address_and_interface(caplog):
    made = paths()
    for _ in range(3):
        made.record_transfer("n2", "10.0.0.2:7070", 64 * MIB, 0.5)
    (said,) = warnings(caplog)
    for part in ("n2", "10.0.0.2:7070", "eth0", "0.134 GB/s", "12.5 GB/s", "another interface"):
        assert part in said
    assert made.bytes_per_s == {"n2": pytest.approx(128 * MIB)}


@pytest.mark.parametrize(
    ("link", "size_bytes", "seconds"),
    [(LINK, 1 << 30, 0.5), (LINK, 4 * MIB, 1.0), (LINK, 64 * MIB, 0.0), (None, 64 * MIB, 9.0)],
    ids=["fast", "too little to say", "no time", "a link that does not say"],
)
def test_no_warning(caplog, link, size_bytes, seconds):
    paths(link).record_transfer("n2", "a:1", size_bytes, seconds)
    assert warnings(caplog) == []


def test_single_slow_transfer_does_not_warn(caplog):
    made = paths()
    for seconds in (0.01, 0.01, 0.09):
        made.record_transfer("n2", "a:1", 64 * MIB, seconds)
    assert warnings(caplog) == []
    made.record_transfer("n3", "b:1", 64 * MIB, 0.01)
    assert made.bytes_per_s["n3"] > made.bytes_per_s["n2"] > 64 * MIB / 0.09


def test_unknown_route_does_not_fail_a_transfer(caplog):
    def unknown(_address):
        raise PeerUnreachableError("no route")

    made = PathMonitor(link=unknown)
    made.record_transfer("n2", "a:1", 64 * MIB, 9.0)
    assert warnings(caplog) == []
    assert made.bytes_per_s == {"n2": pytest.approx(64 * MIB / 9)}
