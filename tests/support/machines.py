"""Hosts of a test's network with what makes them machines: a name, shared memory, and /etc/hosts as Debian writes it.

There a machine's own name leads to 127.0.1.1, and only the others' names to their addresses.
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
    """A file for each, for :func:`on_machine`."""
    for name in machines:
        others = [f"{host.address} {other}" for other, host in machines.items() if other != name]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]
        (directory / f"hosts.{name}").write_text("\n".join(lines))


def on_machine(directory: Path, name: str, command: Sequence[object]) -> list[object]:
    """A command with that name and shared memory of its own; to be run on the host."""
    script = _MACHINE.format(name=name, directory=directory)
    return ["unshare", "--mount", "--uts", "--propagation=private", "sh", "-ec", script, "sh", *command]
