"""Addresses, interfaces and link speeds of this machine, and warnings about slow paths to peers."""

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


_ANY = ("", "*", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
_PROBE_ADDRESSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: the kernel only reports its route to them, and nothing is sent."""
_SIOCGIFADDR = 0x8915

AddressInfo = tuple[int, int, int, str, Any]


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[host]:port``; an empty host means every address of this machine."""
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
    """Return whether the host is reachable only from this machine."""
    found = _ip(host.strip("[]"))
    return host == "localhost" or bool(found and found.is_loopback)


def resolve_host(host: str, port: int, *, within_s: float) -> list[AddressInfo]:
    """Return the addresses of ``host``; raise :class:`PeerUnreachableError` if that fails or is late."""
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
        raise PeerUnreachableError(f"{host!r} was not resolved within {within_s:g} s") from None
    if isinstance(answer, Exception):
        raise PeerUnreachableError(f"cannot resolve {host!r}: {answer}") from answer
    return answer


def _look_up(host: str, port: int, flags: int) -> list[AddressInfo]:
    return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]


def interface_addresses(interface: str) -> list[str]:
    """Return the addresses of an interface by its name (``eth1``); an address is returned itself."""
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
    """Return this machine's address on ``interface`` in one address family."""
    wanted = ":" if family == socket.AF_INET6 else "."
    for address in interface_addresses(interface):
        if (":" if ":" in address else ".") == wanted:
            return address
    raise RequestError(f"interface {interface!r} has no {'IPv6' if wanted == ':' else 'IPv4'} address")


def interface_with_address(address: str) -> str | None:
    """Return the name of the interface that has ``address``."""
    for _, name in socket.if_nameindex():
        if address in _ipv4_of(name):
            return name
    return next((name for name, known in _ipv6() if ipaddress.ip_address(known) == _ip(address)), None)


def local_address_for(peer_address: str) -> str:
    """Return the local address on the route to ``peer_address`` (``host:port``); sends nothing."""
    host, port = split_address(peer_address)
    for family, _, _, _, where in resolve_host(host, port or 9, within_s=5.0):
        if (found := _source(family, where)) is not None:
            return found
    raise PeerUnreachableError(f"no interface of this machine leads to {peer_address}")


def outbound_address() -> str:
    """Return this machine's address on the default route, to announce for a listener on all addresses."""
    for family, nowhere in _PROBE_ADDRESSES.items():
        if (found := _source(family, (nowhere, 9))) is not None:
            return found
    for _, name in socket.if_nameindex():
        for address in _ipv4_of(name):
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return "127.0.0.1"


def link_speed_bytes_per_s(interface: str, sysfs: Path = Path("/sys/class/net")) -> float | None:
    """Return the speed of an interface's link; ``None`` for virtual interfaces, which report none."""
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
    """Return (interface, address) of every IPv6 address that is not link-local.

    Other hosts cannot use link-local addresses.
    """
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


_SLOW_FRACTION = 0.1
"""Fraction of the link speed below which a path is slow. One stream does not fill a fast link."""


def route_to(peer_address: str) -> tuple[str, float | None]:
    """Return the interface on the route to ``peer_address``, and its link's bytes per second if known."""
    local = local_address_for(peer_address)
    interface = interface_with_address(local)
    return (interface, link_speed_bytes_per_s(interface)) if interface else (local, None)


def slow_path_warning(measured: float, link: float | None, *, way: str = "the way to this peer") -> str | None:
    """Return a warning if ``measured`` is far below ``link`` (both in bytes per second), else ``None``."""
    if link is None or measured >= link * _SLOW_FRACTION:
        return None
    return (
        f"{way} moves {measured / 1e9:.3g} GB/s, {measured / link:.1%} of what its link could ({link / 1e9:.3g} GB/s): "
        "is it the network that is meant for this? Name another interface, or look for what else uses this one"
    )


_MIN_MEASURED_BYTES = 8 << 20
"""Smallest transfer that is measured; smaller ones are dominated by round trips."""
_EWMA_WEIGHT = 0.3
"""Weight of the newest transfer in the average."""

RouteLookup = Callable[[str], tuple[str, float | None]]


class PathMonitor:
    """Transfer rates to each node, with a warning for slow paths. Thread-safe."""

    def __init__(self, *, link: RouteLookup = route_to) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        self._warned: set[str] = set()

    def record_transfer(self, node: str, address: str, size_bytes: int, seconds: float) -> None:
        """Record an unlimited transfer of ``size_bytes`` to ``node``."""
        if size_bytes < _MIN_MEASURED_BYTES or seconds <= 0:
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
        """Average bytes per second to each node."""
        with self._lock:
            return dict(self._rates)
