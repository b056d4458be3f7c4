"""Addresses, interfaces and link speeds of this machine, and a warning when a peer's link is far below its speed."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peerstore.errors import PeerStoreError, PeerUnreachableError, RequestError

log = logging.getLogger(__name__)


_ANY = ("", "*", "0.0.0.0", "::")  # noqa: S104 - what it is called when somebody asks for it
_NOWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation: nothing is sent there, the kernel only says by which way it would be."""
_SIOCGIFADDR = 0x8915

AddressInfo = tuple[int, int, int, str, Any]


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[host]:port``; an empty host is every address of this machine."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise RequestError(
            f"address {address!r} is not host:port, for example node7:7070, 10.0.0.7:7070 or [fd00::7]:7070"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard_host(host: str) -> bool:
    return host in _ANY


def is_loopback_host(host: str) -> bool:
    """Whether nobody but this machine reaches it there."""
    found = _ip(host.strip("[]"))
    return host == "localhost" or bool(found and found.is_loopback)


def resolve_host(host: str, port: int, *, within_s: float) -> list[AddressInfo]:
    """The addresses of ``host``, or :class:`PeerUnreachableError`, also when who knows names does not answer."""
    with contextlib.suppress(socket.gaierror):
        return _look_up(host, port, socket.AI_NUMERICHOST)
    answers: queue.SimpleQueue[list[AddressInfo] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_look_up(host, port, 0))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="peerstore-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=within_s)
    except queue.Empty:
        raise PeerUnreachableError(f"nobody said within {within_s:g} s where {host!r} is") from None
    if isinstance(answer, Exception):
        raise PeerUnreachableError(f"it is not known where {host!r} is: {answer}") from answer
    return answer


def _look_up(host: str, port: int, flags: int) -> list[AddressInfo]:
    return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]


def interface_addresses(interface: str) -> list[str]:
    """The addresses of an interface by its name (``eth1``), or the address itself when it is one already."""
    try:
        return [str(ipaddress.ip_address(interface.partition("%")[0])) if "%" not in interface else interface]
    except ValueError:
        pass
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise RequestError(f"there is no interface {interface!r} here, only {', '.join(sorted(names))}")
    found = [*_ipv4_of(interface), *(address for name, address in _ipv6() if name == interface)]
    if not found:
        raise RequestError(f"interface {interface!r} has no address")
    return found


def interface_address(interface: str, family: int) -> str:
    """This machine's address on ``interface`` in one family of addresses."""
    wanted = ":" if family == socket.AF_INET6 else "."
    for address in interface_addresses(interface):
        if (":" if ":" in address else ".") == wanted:
            return address
    raise RequestError(f"interface {interface!r} has no {'IPv6' if wanted == ':' else 'IPv4'} address")


def interface_with_address(address: str) -> str | None:
    """The name of the interface that has ``address``."""
    for _, name in socket.if_nameindex():
        if address in _ipv4_of(name):
            return name
    return next((name for name, known in _ipv6() if ipaddress.ip_address(known) == _ip(address)), None)


def local_address_for(peer_address: str) -> str:
    """By which of its own addresses this machine would reach ``peer_address`` (``host:port``). Sends nothing."""
    host, port = split_address(peer_address)
    for family, _, _, _, where in resolve_host(host, port or 9, within_s=5.0):
        if (found := _source(family, where)) is not None:
            return found
    raise PeerUnreachableError(f"no interface of this machine leads to {peer_address}")


def outbound_address() -> str:
    """The address by which this machine would reach others in general; for who listens on all of them."""
    for family, nowhere in _NOWHERE.items():
        if (found := _source(family, (nowhere, 9))) is not None:
            return found
    for _, name in socket.if_nameindex():
        for address in _ipv4_of(name):
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return "127.0.0.1"


def link_speed_bytes_per_s(interface: str, sysfs: Path = Path("/sys/class/net")) -> float | None:
    """The speed of an interface's link, where it has one: virtual interfaces do not say."""
    try:
        megabits = int((sysfs / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def _source(family: int, where: Any) -> str | None:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
    return None


def _ipv4_of(interface: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6() -> list[tuple[str, str]]:
    """(interface, address) of every IPv6 address but the link-local ones, which mean nothing to others."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [
        (name, str(ipaddress.IPv6Address(bytes.fromhex(raw)))) for raw, _, _, scope, _, name in fields if scope != "20"
    ]


def _ip(address: str) -> Any:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


_FAR_BELOW = 0.1
"""One stream of one process does not fill a fast link; a tenth of it is the wrong way."""


def route_to(peer_address: str) -> tuple[str, float | None]:
    """The interface by which this machine reaches ``peer_address``, and its link's bytes per second, if it says."""
    local = local_address_for(peer_address)
    interface = interface_with_address(local)
    return (interface, link_speed_bytes_per_s(interface)) if interface else (local, None)


def slow_path_warning(measured: float, link: float | None, *, way: str = "the way to this peer") -> str | None:
    """What to tell the operator when ``measured`` is far below ``link`` (both in bytes per second)."""
    if link is None or measured >= link * _FAR_BELOW:
        return None
    return (
        f"{way} moves {measured / 1e9:.3g} GB/s, {measured / link:.1%} of what its link could ({link / 1e9:.3g} GB/s): "
        "is it the network that is meant for this? Name another interface, or look for what else uses this one"
    )


_LEAST_BYTES = 8 << 20
"""What is sent in less time than a few round trips says little about the way."""
_EWMA_WEIGHT = 0.3
"""How much the newest transfer counts."""

RouteLookup = Callable[[str], tuple[str, float | None]]


class PathMonitor:
    """What transfers have shown. Any thread may call."""

    def __init__(self, *, link: RouteLookup = route_to) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        self._warned: set[str] = set()

    def record_transfer(self, node: str, address: str, size_bytes: int, seconds: float) -> None:
        """So many bytes went to ``node`` without a limit on them."""
        if size_bytes < _LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            before = self._rates.get(node)
            rate = size_bytes / seconds
            self._rates[node] = rate if before is None else (1 - _EWMA_WEIGHT) * before + _EWMA_WEIGHT * rate
            known = node in self._warned
        if not known:
            self._warn_if_slow(node, address)

    def _warn_if_slow(self, node: str, address: str) -> None:
        try:
            interface, link = self._link(address)
        except (PeerStoreError, OSError) as error:
            log.debug("the way to %s is not known: %s", node, error)
            return
        words = slow_path_warning(self._rates[node], link, way=f"the way to {node} ({address}, by {interface})")
        if words is not None:
            log.warning("%s", words)
            with self._lock:
                self._warned.add(node)

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """Bytes per second to each node, as measured last."""
        with self._lock:
            return dict(self._rates)
