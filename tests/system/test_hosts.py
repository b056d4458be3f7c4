"""Simulated hosts: isolation, connectivity, and the effect of every fault on real sockets."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from peerstore.daemon_process import process_start_time
from tests.support import namespaces
from tests.support.hosts import network

pytestmark = pytest.mark.system
MIB = 1 << 20
HANGS_S = 0.3


@contextlib.contextmanager
def connection(client, server):
    """Both ends of a TCP connection between two hosts."""
    with server.listen() as listener:
        listener.settimeout(10)
        with client.connect(server, listener.getsockname()[1]) as near:
            far, _ = listener.accept()
            far.settimeout(20)
            near.settimeout(20)
            with far:
                yield near, far


def assert_connects(client, server):
    with connection(client, server) as (near, far):
        near.sendall(b"hello")
        assert far.recv(5) == b"hello"


def assert_hangs(client, server):
    with server.listen() as listener, pytest.raises(TimeoutError):
        client.connect(server, listener.getsockname()[1], timeout_s=HANGS_S)


def mailbox(host):
    sock = host.socket(socket.SOCK_DGRAM)
    sock.bind((host.address, 0))
    sock.settimeout(20)
    return sock


def send_in_background(sock, content):
    def send_all():
        with contextlib.suppress(ConnectionError):
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send_all)
    thread.start()
    return thread


def receive_all(sock):
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def interfaces():
    return sorted(Path("/sys/class/net").iterdir())


@pytest.fixture
def host_pair(net):
    return net.host("n1"), net.host("n2")


class TestHosts:
    def test_host_reaches_itself_and_every_other_host(self, net):
        hosts = [net.host(name) for name in ("n1", "n2", "n3")]
        assert [host.address for host in hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        for client in hosts:
            for server in hosts:
                assert_connects(client, server)

    def test_machine_is_not_on_the_hosts_network(self, net):
        before = interfaces()
        n1 = net.host("n1")
        assert interfaces() == before
        assert {line.split(":")[0].strip() for line in n1.run(["cat", "/proc/net/dev"]).splitlines()[2:]} == {
            "lo",
            "eth0",
        }
        with n1.listen() as listener, socket.socket() as sock:
            sock.settimeout(HANGS_S)
            with pytest.raises(OSError):
                sock.connect(listener.getsockname())

    def test_host_process_is_a_child_in_the_hosts_namespace(self, host_pair):
        n1, n2 = host_pair
        process = n1.start(["sh", "-c", "echo $$; exec sleep 600"], stdout=subprocess.PIPE)
        assert int(process.stdout.readline()) == process.pid
        assert process.pid in namespaces.processes_in(n1.namespace)
        assert process.pid not in namespaces.processes_in(n2.namespace)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM

    def test_failed_command_raises_its_stderr(self, host_pair):
        with pytest.raises(RuntimeError, match="on n1 ended with 3: no such luck"):
            host_pair[0].run(["sh", "-c", "echo no such luck >&2; exit 3"])
        assert host_pair[0].run(["sh", "-c", "echo still; exit 3"], check=False) == "still\n"

    @pytest.mark.parametrize("name", ["", "N1", "a/b", "bridge", "n1", "x" * 33])
    def test_invalid_host_name_is_refused(self, host_pair, net, name):
        with pytest.raises(ValueError, match="each name once"):
            net.host(name)


class TestCleanup:
    def test_failed_network_setup_leaves_nothing(self):
        seen = []

        def interrupted():
            with network() as net:
                n1 = net.host("n1")
                n1.start(["sleep", "600"])
                orphan = n1.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"])
                seen.extend([net.prefix, int(orphan)])
                net.delay(n1, net.host("n2"), 0.1)
                n1.directory.mkdir()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        prefix, orphan = seen
        assert process_start_time(orphan) < 0
        assert not [path for place in namespaces.PLACES for path in place.glob(f"{prefix}*")]

    def test_next_network_removes_leftovers_of_a_killed_run(self, net):
        source = (
            "import os, signal, subprocess\n"
            "from tests.support.hosts import network\n"
            "with network() as net:\n"
            "    n1 = net.host('n1')\n"
            "    print(net.prefix, n1.start(['sleep', '600'], stdout=subprocess.DEVNULL).pid, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        root = Path(__file__).parents[2]
        run = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, cwd=root, timeout=200)
        prefix, pid = run.stdout.split()
        left = [path.name for place in namespaces.PLACES for path in place.glob(f"{prefix}*")]
        assert sorted(left) == [prefix, f"{prefix}-bridge", f"{prefix}-n1"]
        assert process_start_time(int(pid)) >= 0
        with network():
            assert process_start_time(int(pid)) < 0
            assert not [path for place in namespaces.PLACES for path in place.glob(f"{prefix}*")]
            assert namespaces.namespace_path(net.hub).exists(), "networks of live processes stay"

    def test_missing_support_for_namespaces_has_a_reason(self, monkeypatch):
        why_not = namespaces.missing_reason.__wrapped__
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr(os, "getuid", lambda: 0)
        assert why_not() == "not installed: ip, tc, iptables, iptables-restore, nsenter"
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        assert why_not() == "only root can make network namespaces"


class TestCuts:
    def test_cut_blocks_both_directions_until_healed(self, host_pair, net):
        n1, n2 = host_pair
        n3 = net.host("n3")
        net.cut(n1, n2)
        assert_hangs(n1, n2)
        assert_hangs(n2, n1)
        assert_connects(n1, n3)
        assert_connects(n3, n2)
        net.heal(n1, n2)
        assert_connects(n1, n2)

    def test_connection_survives_a_cut(self, host_pair, net):
        with connection(*host_pair) as (near, far):
            net.cut(*host_pair)
            near.sendall(b"late")
            far.settimeout(HANGS_S)
            with pytest.raises(TimeoutError):
                far.recv(4)
            net.heal(*host_pair)
            far.settimeout(20)
            assert far.recv(4) == b"late"

    def test_one_way_cut_blocks_a_single_direction(self, host_pair, net):
        n1, n2 = host_pair
        with mailbox(n1) as at_n1, mailbox(n2) as at_n2:
            net.cut(n1, n2, one_way=True)
            at_n2.sendto(b"arrives", at_n1.getsockname())
            assert at_n1.recv(100) == b"arrives"
            at_n1.sendto(b"is lost", at_n2.getsockname())
            net.heal(n1, n2)
            at_n1.sendto(b"after it", at_n2.getsockname())
            assert at_n2.recv(100) == b"after it"

    def test_partition_separates_groups_only(self, net):
        n1, n2, n3 = (net.host(name) for name in ("n1", "n2", "n3"))
        net.partition([n1, n2], [n3])
        assert_connects(n1, n2)
        for inside in (n1, n2):
            assert_hangs(inside, n3)
            assert_hangs(n3, inside)
        net.heal(n2, n3)
        assert_connects(n3, n2)
        assert_hangs(n3, n1)
        net.heal_all()
        assert_connects(n3, n1)


class TestHostFaults:
    def test_unplugged_host_has_no_network_until_plugged(self, host_pair):
        n1, n2 = host_pair
        with connection(n2, n1) as (near, far):
            n1.unplug()
            with pytest.raises(OSError, match="Network is unreachable"):
                n1.connect(n2, 1)
            with pytest.raises(OSError):  # a timeout or a failed ARP request
                n2.connect(n1, 1, timeout_s=HANGS_S)
            near.sendall(b"late")
            n1.plug()
            assert far.recv(4) == b"late"
        assert_connects(n1, n2)

    def test_refused_peer_gets_connection_refused(self, host_pair, net):
        n1, n2 = host_pair
        with connection(n2, n1) as (near, _), n1.listen() as listener:
            n1.refuse(n2)
            with pytest.raises(ConnectionRefusedError):
                n2.connect(n1, listener.getsockname()[1])
            near.sendall(b"x")
            with pytest.raises(ConnectionResetError):
                near.recv(1)
        assert_connects(net.host("n3"), n1)
        net.heal(n1, n2)
        assert_connects(n2, n1)

    @pytest.mark.parametrize("direction", ["from", "to"])
    def test_throttled_host_is_slow_in_both_directions(self, host_pair, direction):
        """16 MiB less a burst take at least 1.3 s at 100 Mbit/s."""
        n1, n2 = host_pair if direction == "from" else host_pair[::-1]
        host_pair[0].throttle("100mbit")
        assert seconds_to_move(n1, n2, 16 * MIB) > 1.2
        host_pair[0].unthrottle()
        assert "tbf" not in host_pair[0].run(["tc", "qdisc", "show"])

    @pytest.mark.parametrize("direction", ["from", "to"])
    def test_lost_packets_are_sent_again(self, host_pair, direction):
        n1, n2 = host_pair if direction == "from" else host_pair[::-1]
        content = os.urandom(8 * MIB)
        host_pair[0].set_loss(0.1)
        with connection(n1, n2) as (near, far):
            sender = send_in_background(near, content)
            assert receive_all(far) == content
            sender.join()
        assert retransmitted(n1) > 0
        host_pair[0].set_loss(0)
        assert not host_pair[1].run(["iptables", "-S", "INPUT"]).count("statistic")

    def test_packet_loss_applies_in_both_directions(self, host_pair):
        n1, n2 = host_pair
        with mailbox(n1) as at_n1, mailbox(n2) as at_n2:
            for lossy, other in (at_n1, at_n2), (at_n2, at_n1):
                n1.set_loss(1.0)
                lossy.sendto(b"is lost", other.getsockname())
                n1.set_loss(0)
                lossy.sendto(b"after it", other.getsockname())
                assert other.recv(100) == b"after it"

    def test_heal_all_removes_every_fault(self, host_pair, net):
        n1, n2 = host_pair
        net.cut(n1, n2)
        n1.refuse(n2)
        n1.set_loss(1.0)
        n1.unplug()
        n2.throttle("8kbit")
        net.delay(n1, n2, 600)
        net.heal_all()
        assert_connects(n1, n2)
        assert_connects(n2, n1)
        assert "tbf" not in n2.run(["tc", "qdisc", "show"])

    @pytest.mark.parametrize("rate", ["fast", "100", "100mbps"])
    def test_invalid_rate_is_refused(self, host_pair, rate):
        with pytest.raises(ValueError, match="100mbit"):
            host_pair[0].throttle(rate)


def seconds_to_move(client, server, size):
    """Return the seconds until all bytes have arrived."""
    with connection(client, server) as (near, far):
        sender = send_in_background(near, bytes(size))
        began = time.monotonic()
        assert len(receive_all(far)) == size
        sender.join()
        return time.monotonic() - began


def retransmitted(host):
    names, numbers = (line.split() for line in host.run(["cat", "/proc/net/snmp"]).splitlines() if line[:4] == "Tcp:")
    return int(dict(zip(names[1:], numbers[1:], strict=True))["RetransSegs"])


class TestSlowPaths:
    def test_delayed_connection_keeps_the_addresses_of_its_ends(self, host_pair, net):
        n1, n2 = host_pair
        net.delay(n1, n2, 0.1)
        for client, server in (n1, n2), (n2, n1):
            with connection(client, server) as (near, far):
                assert near.getpeername() == far.getsockname()
                assert far.getpeername()[0] == client.address
                began = time.monotonic()
                near.sendall(b"ping")
                far.sendall(far.recv(4))
                assert near.recv(4) == b"ping"
                assert time.monotonic() - began >= 0.2

    def test_slow_path_carries_only_connections_between_its_hosts(self, host_pair, net):
        n1, n2 = host_pair
        path = net.slow_path(n1, n2, latency_s=600)
        assert_connects(n2, n1)
        assert_connects(n1, net.host("n3"))
        assert path.forth.passed_bytes == 0
        with pytest.raises(ValueError, match="already"):
            net.slow_path(n1, n2)
        net.heal(n1, n2)
        assert_connects(n1, n2)

    def test_slow_path_flips_a_bit_and_resets(self, host_pair, net):
        path = net.slow_path(*host_pair)
        with connection(*host_pair) as (near, far):
            path.forth.flip_bit(at_byte=5)
            near.sendall(bytes(10))
            assert far.recv(10, socket.MSG_WAITALL) == bytes(5) + b"\1" + bytes(4)
            path.back.reset_after(0)
            far.sendall(b"never")
            with pytest.raises(ConnectionResetError):
                near.recv(1)

    def test_cut_applies_to_a_slow_path(self, host_pair, net):
        net.slow_path(*host_pair)
        with connection(*host_pair) as (near, far):
            near.sendall(b"1")
            assert far.recv(1) == b"1"
            net.cut(*host_pair)
            near.sendall(b"2")
            far.settimeout(HANGS_S)
            with pytest.raises(TimeoutError):
                far.recv(1)


class TestAgents:
    def test_agents_serve_processes_of_their_host(self, net):
        agents = [host.agent(host.directory, "--budget", "64MiB") for host in (net.host("n1"), net.host("n2"))]
        for agent in agents:
            with contextlib.closing(agent.client()) as client:
                assert client.status().arena.budget_bytes == 64 * MIB
            assert agent.http[0] == agent.host.address
            assert agent.pid in namespaces.processes_in(agent.host.namespace)
        assert status_of(agents[0], seen_from=net.hosts["n2"])
        net.cut(net.hosts["n1"], net.hosts["n2"])
        with pytest.raises(TimeoutError):
            status_of(agents[0], seen_from=net.hosts["n2"], timeout_s=HANGS_S)
        assert [agent.stop() for agent in agents] == [0, 0]
        assert "agent leaves" in agents[1].log_text()

    def test_killed_agent_is_replaced_on_its_host(self, net):
        n1 = net.host("n1")
        first = n1.agent(n1.directory)
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        second = n1.agent(n1.directory)
        assert second.pid != first.pid
        second.kill(signal.SIGSTOP)
        assert os.waitid(os.P_PID, second.pid, os.WSTOPPED | os.WNOWAIT).si_status == signal.SIGSTOP

    def test_failed_host_agent_reports_the_reason(self, net):
        n1 = net.host("n1")
        with pytest.raises(RuntimeError, match="keeps nothing"):
            n1.agent(n1.directory, "--budget", "0")


def status_of(agent, *, seen_from, timeout_s=10.0):
    address, port = agent.http
    connection = http.client.HTTPConnection(address, port)
    with seen_from.connect(address, port, timeout_s=timeout_s) as connection.sock:
        connection.request("GET", "/status")
        return json.loads(connection.getresponse().read())
