"""Hosts of a test's network as machines: a name, shared memory, and /etc/hosts as Debian writes it.

There, a machine's own name resolves to 127.0.1.1, and only the other names resolve to network addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.hosts import Host

_MACHINE = """\
hostname {name}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {directory}/hosts.{name} /etc/hosts
exec "$@"
"""


def write_names(directory: Path, machines: Mapping[str, Host]) -> None:
    """Write the hosts file of each machine, for :func:`on_machine`."""
    for name in machines:
        others = [f"{host.address} {other}" for other, host in machines.items() if other != name]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]
        (directory / f"hosts.{name}").write_text("\n".join(lines))


def on_machine(directory: Path, name: str, command: Sequence[object]) -> list[object]:
    """Wrap a command so that on the host it has that name and its own shared memory."""
    script = _MACHINE.format(name=name, directory=directory)
    return ["unshare", "--mount", "--uts", "--propagation=private", "sh", "-ec", script, "sh", *command]
