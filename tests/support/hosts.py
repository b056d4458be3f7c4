"""Network namespaces as hosts on one bridge, with real processes and injected link faults.

::

    with network() as net:
        n1, n2 = net.host("n1"), net.host("n2")
        agent = n1.agent(n1.directory, "--budget", "1GiB")
        net.cut(n1, n2)
        ...
        net.heal(n1, n2)

The bridge has its own namespace, so the machine's network stays untouched. Lost packets are dropped at the receiver, so
the sender's kernel sees only silence. Requires root, iproute2 and iptables; :func:`network` skips the test elsewhere.
Not every kernel has netem, so a proxy adds the delays: see :meth:`Network.delay`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import namespaces
from tests.support.host_agent import HostAgent
from tests.support.packet_filter import LinkFaults, burst_bytes
from tests.support.slow_path import SlowPath

_SUBNET = "10.77.0"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_PAST_PROXIES = 0x5107
"""Mark on packets of proxies, which must not be sent to a proxy again."""


class Host:
    """One namespace with an address; made by :meth:`Network.host`."""

    def __init__(self, net: Network, name: str, number: int) -> None:
        self.name = name
        self.address = f"{_SUBNET}.{number}"
        self.namespace = f"{net.prefix}-{name}"
        self.directory = net.directory / name
        """Agent directory on shared memory, reachable from every host and removed at the end."""
        self.port = f"p{number}"
        """Interface at the bridge end of the cable."""
        self._net = net
        self._processes: list[subprocess.Popen[Any]] = []
        self._agents: list[HostAgent] = []

    def __repr__(self) -> str:
        return f"<host {self.name} {self.address}>"

    # -- processes ------------------------------------------------------------------------------------------------

    def run(self, command: Sequence[object], *, check: bool = True, timeout_s: float = 60.0, **popen: Any) -> str:
        """Run ``command`` on this host and return its output."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
        done = subprocess.run(self._command(command), timeout=timeout_s, **options)
        if check and done.returncode:
            raise RuntimeError(f"{command} on {self.name} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def start(self, command: Sequence[object], **popen: Any) -> subprocess.Popen[Any]:
        """Start a child process on this host. Closing the network kills it."""
        process = subprocess.Popen(self._command(command), **{"stdin": subprocess.DEVNULL, **popen})
        self._processes.append(process)
        return process

    def agent(self, directory: Path, *options: object) -> HostAgent:
        """Start a node agent and wait until it answers. ``options`` override the defaults."""
        agent = HostAgent(self, directory, options)
        self._agents.append(agent)
        agent.wait_ready()
        return agent

    # -- sockets of the test itself -------------------------------------------------------------------------------

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a socket of this host, usable from any thread of the test."""
        return namespaces.run_inside(self.namespace, lambda: socket.socket(socket.AF_INET, kind))

    def connect(self, peer: Host | str, port: int, *, timeout_s: float = 10.0) -> socket.socket:
        sock = self.socket()
        sock.settimeout(timeout_s)
        try:
            sock.connect((peer.address if isinstance(peer, Host) else peer, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def listen(self, port: int = 0) -> socket.socket:
        sock = self.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.address, port))
        sock.listen(128)
        return sock

    # -- faults ---------------------------------------------------------------------------------------------------

    def unplug(self) -> None:
        """Take the interface down: ENETUNREACH here, silence for the others."""
        namespaces.run_ip_batch(self.namespace, ["link set eth0 down"])

    def plug(self) -> None:
        namespaces.run_ip_batch(self.namespace, ["link set eth0 up"])

    def refuse(self, peer: Host) -> None:
        """Answer TCP segments from ``peer`` with a reset, also on existing connections."""
        self._net.wires.refused.add((peer.name, self.name))
        self._net.apply_rules(self)

    def throttle(self, rate: str) -> None:
        """Limit the rate in each direction, in tc notation such as ``100mbit``."""
        for place, device in self._ends():
            namespaces.limit_rate(place, device, f"rate {rate} burst {burst_bytes(rate)} latency 50ms")

    def unthrottle(self) -> None:
        for place, device in self._ends():
            if "tbf" in namespaces.run_tool("tc", "-n", place, "qdisc", "show", "dev", device):
                namespaces.run_tool("tc", "-n", place, "qdisc", "del", "dev", device, "root")

    def set_loss(self, share: float) -> None:
        """Drop this share of packets from and to this host at random.

        A share of 0 ends it. A lost packet may be 64 KiB (GSO).
        """
        self._net.wires.lost[self.name] = share
        self._net.apply_rules(*self._net.hosts.values())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _command(self, command: Sequence[object]) -> list[str]:
        return [*namespaces.nsenter_command(self.namespace), *(str(word) for word in command)]

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return both ends of the cable: the host's interface and the bridge port."""
        return (self.namespace, "eth0"), (self._net.hub, self.port)

    def close(self) -> None:
        """Kill every process on this host and remove its namespace."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        namespaces.remove(self.namespace)
        for agent in self._agents[-1:]:
            print(f"-- agent of {self.name}, end of its log:\n{agent.log_text()[-4000:]}")  # pytest shows it on failure


class Network:
    """A bridge and the hosts on it; made by :func:`network`."""

    def __init__(self, prefix: str, undo: contextlib.ExitStack) -> None:
        self.prefix = prefix
        self.hosts: dict[str, Host] = {}
        self.wires = LinkFaults()
        self.directory = Path("/dev/shm") / prefix
        self.hub = f"{prefix}-bridge"
        self._undo = undo
        self._numbers = itertools.count(1)
        self._paths: dict[tuple[str, str], contextlib.ExitStack] = {}
        undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.mkdir(mode=0o700)
        undo.callback(namespaces.remove, self.hub)
        namespaces.create(self.hub)
        namespaces.run_ip_batch(self.hub, ["link add br0 type bridge", "link set br0 up"])

    def host(self, name: str) -> Host:
        if not _NAME.fullmatch(name) or name in (*self.hosts, "bridge"):
            raise ValueError(f"host name {name!r}: use small letters, digits and '-', and each name once")
        host = Host(self, name, next(self._numbers))
        self._undo.callback(host.close)
        namespaces.create(host.namespace)
        namespaces.run_ip_batch(
            self.hub,
            [
                f"link add {host.port} type veth peer name eth0 netns {host.namespace}",
                f"link set {host.port} master br0 up",
            ],
        )
        namespaces.run_ip_batch(
            host.namespace,
            [
                "link set lo up",
                "link set eth0 addrgenmode none",  # no IPv6, which faults do not cover
                f"addr add {host.address}/24 dev eth0",
                "link set eth0 up",
            ],
        )
        self.hosts[name] = host
        self.apply_rules(host)
        return host

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self, one: Host, other: Host, *, one_way: bool = False) -> None:
        """Drop packets between two hosts silently; with ``one_way``, only those from ``one`` to ``other``."""
        self.wires.cut.add((one.name, other.name))
        if not one_way:
            self.wires.cut.add((other.name, one.name))
        self.apply_rules(one, other)

    def partition(self, *groups: Sequence[Host]) -> None:
        """Cut every host from those of the other groups."""
        for some, others in itertools.permutations(groups, 2):
            self.wires.cut.update((one.name, other.name) for one in some for other in others)
        self.apply_rules(*itertools.chain(*groups))

    def heal(self, one: Host, other: Host) -> None:
        """Undo cuts, refusals and delays between these two, in both directions."""
        self.wires.heal(one.name, other.name)
        self.apply_rules(one, other)
        self.heal_paths(one, other)

    def heal_all(self) -> None:
        """Remove all faults."""
        self.wires = LinkFaults()
        self.apply_rules(*self.hosts.values())
        self.heal_paths()
        for host in self.hosts.values():
            host.plug()
            host.unthrottle()

    def delay(self, one: Host, other: Host, latency_s: float) -> tuple[SlowPath, SlowPath]:
        """Delay each direction of TCP connections opened from now on. UDP is not delayed."""
        return self.slow_path(one, other, latency_s=latency_s), self.slow_path(other, one, latency_s=latency_s)

    def slow_path(self, client: Host, server: Host, **shape: float) -> SlowPath:
        """Route new TCP connections from ``client`` to ``server`` through a transparent proxy.

        The client's connect succeeds as soon as the proxy accepts it, so a cut or a closed port shows only later.
        Healing closes the connections that went through the proxy.
        """
        if (client.name, server.name) in self._paths:
            raise ValueError(f"there is a slow path from {client.name} to {server.name} already")
        with contextlib.ExitStack() as building:
            path = SlowPath(None, enter=lambda: namespaces.enter(client.namespace), mark=_PAST_PROXIES, **shape)
            building.enter_context(path)
            match = f"OUTPUT -d {server.address} -p tcp -m mark ! --mark {_PAST_PROXIES:#x} -j REDIRECT --to-ports"
            rule = [*match.split(), str(path.port)]
            in_table = [*namespaces.nsenter_command(client.namespace), "iptables", "-t", "nat"]
            namespaces.run_tool(*in_table, "-A", *rule)
            building.callback(namespaces.run_tool, *in_table, "-D", *rule)
            self._paths[client.name, server.name] = building.pop_all()
        return path

    # -- inside ---------------------------------------------------------------------------------------------------

    def apply_rules(self, *hosts: Host) -> None:
        addresses = {host.name: host.address for host in self.hosts.values()}
        for host in hosts:
            rules = self.wires.rules(host.name, addresses)
            namespaces.run_tool(*namespaces.nsenter_command(host.namespace), "iptables-restore", text=rules)

    def heal_paths(self, *between: Host) -> None:
        """End the slow paths among these hosts, or all."""
        names = {host.name for host in between or self.hosts.values()}
        with contextlib.ExitStack() as ending:
            for ends in [ends for ends in self._paths if names.issuperset(ends)]:
                ending.enter_context(self._paths.pop(ends))


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Create a network without hosts. Leaving the block ends all its processes."""
    if reason := namespaces.missing_reason():
        pytest.skip(reason)
    namespaces.remove_leftovers()
    with contextlib.ExitStack() as undo:
        made = Network(namespaces.new_prefix(), undo)
        try:
            yield made
        finally:
            made.heal_paths()


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made
