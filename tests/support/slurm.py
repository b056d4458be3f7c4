"""Slurm cluster of network namespaces: Debian's slurmctld, slurmd and munge.

::

    with slurm_cluster(directory, nodes=3) as slurm:
        job = slurm.submit("train.sbatch")
        slurm.wait_state(job, "COMPLETED")

Each machine has its own name, shared memory and /etc/hosts. As on Debian, its own name resolves to 127.0.1.1. The
machines share the directory, which holds all configuration. No daemon outlives the block.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import namespaces
from tests.support.hosts import Host, Network, network
from tests.support.machines import on_machine, write_names

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "salloc", "scontrol", "squeue", "unshare")
_PATIENCE_S = 240.0
_PAUSE_S = 0.1
_CONTROLLER_PORT, _NODE_PORT = 6817, 6818

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/pgid
Epilog={directory}/epilog
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobRequeue=1
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=30
MessageTimeout=10
SchedulerParameters=sched_interval=2,bf_interval=2
MinJobAge=300
MaxArraySize=10
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
"""

# Like proctrack/cgroup at the end of a step: kill what the job left on the machine, such as an agent.
_EPILOG = """\
#!/bin/sh
for one in /proc/[0-9]*; do
    [ "$(readlink $one/ns/net)" = "$(readlink /proc/self/ns/net)" ] || continue
    tr '\\0' ' ' <$one/cmdline | grep -q tieredckpt.agent && kill -9 "${one#/proc/}"
done
exit 0
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Slurm:
    """An idle cluster, made by :func:`slurm_cluster`."""

    def __init__(self, net: Network, directory: Path, count: int) -> None:
        self.directory = directory
        self._head = net.host("head")
        self.nodes = {name: net.host(name) for name in (f"n{number}" for number in range(1, count + 1))}
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PET_"))},
            "SLURM_CONF": str(directory / "slurm.conf"),
            "HOME": str(directory / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "OMP_NUM_THREADS": "1",
        }
        (directory / "home").mkdir()
        (directory / "state").mkdir()
        self._configure()
        self._start_munge()
        self._start(self._head, "slurmctld", "-D", "-i", "-c", "-f", directory / "slurm.conf")
        for name, host in self.nodes.items():
            (directory / f"spool-{name}").mkdir()
            self._start(host, "slurmd", "-D", "-N", name, "-f", directory / "slurm.conf")
        self.wait_until("all nodes are idle", lambda: self.states().count("idle") == count)

    # -- machines -------------------------------------------------------------------------------------------------

    def lose_node(self, name: str) -> None:
        """Kill all processes of a machine at once, so that none sees another one die.

        Slurm is informed at once, instead of after SlurmdTimeout.
        """
        space = self.nodes[name].namespace
        stopped: set[int] = set()
        while fresh := {*namespaces.processes_in(space)} - stopped:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def processes(self, name: str) -> list[str]:
        """Return the command lines of a machine's processes."""
        found = []
        for pid in namespaces.processes_in(self.nodes[name].namespace):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    # -- commands -------------------------------------------------------------------------------------------------

    def run(self, *command: object, check: bool = True, timeout_s: float = 120.0, **environ: str) -> str:
        """Run a command on the head node and return its output."""
        machine = on_machine(self.directory, self._head.name, command)
        place = {"cwd": self.directory, "env": {**self.environ, **environ}, "stdin": subprocess.DEVNULL}
        return self._head.run(machine, check=check, timeout_s=timeout_s, stderr=subprocess.STDOUT, **place)

    def submit(self, *words: object, **environ: str) -> str:
        return self.run("sbatch", "--parsable", *words, **environ).strip()

    def states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-o", "%T").split()

    def job_details(self, job: str) -> dict[str, str]:
        """Return the fields of ``scontrol show job``."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, job: str, *wanted: str) -> dict[str, str]:
        return self.wait_until(
            f"job {job} is {wanted}", lambda: (s := self.job_details(job))["JobState"] in wanted and s
        )

    def wait_until(self, what: str, ready: Callable[[], object], timeout_s: float = _PATIENCE_S) -> object:
        deadline = time.monotonic() + timeout_s
        while not (found := ready()):
            assert time.monotonic() < deadline, f"it did not happen: {what}\n{self.failure_report()}"
            time.sleep(_PAUSE_S)
        return found

    def failure_report(self) -> str:
        """Return the state of the cluster and the ends of all logs, for a failed test."""
        said = [self.run("squeue", "-a", check=False), self.run("sinfo", "-N", "-l", check=False)]
        logs = sorted([*self.directory.glob("*.log"), *self.directory.glob("*.out")])
        return "\n".join([*said, *(f"-- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)])

    # -- inside ---------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        machines = {"head": self._head, **self.nodes}
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                directory=self.directory,
                head=self._head.address,
                controller_port=_CONTROLLER_PORT,
                node_port=_NODE_PORT,
                nodes="\n".join(
                    f"NodeName={name} NodeAddr={host.address} CPUs=8 RealMemory=4000 State=UNKNOWN"
                    for name, host in self.nodes.items()
                ),
            )
        )
        (self.directory / "epilog").write_text(_EPILOG)
        (self.directory / "epilog").chmod(0o755)
        write_names(self.directory, machines)

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        here = self.directory
        self._head.start(
            [
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={here}/munge.sock"),
                *(f"--pid-file={here}/munged.pid", f"--log-file={here}/munged.log", f"--seed-file={here}/munged.seed"),
                "--num-threads=2",
            ],
            env=self.environ,
        )
        self.wait_until("munge answers", (here / "munge.sock").exists)

    def _start(self, host: Host, *command: object) -> None:
        with (self.directory / f"{host.name}.log").open("ab") as out:
            machine = on_machine(self.directory, host.name, command)
            host.start(machine, env=self.environ, cwd=self.directory, stdout=out, stderr=out)


@contextlib.contextmanager
def slurm_cluster(directory: Path, nodes: int) -> Iterator[Slurm]:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)")
    with network() as net:
        yield Slurm(net, directory, nodes)
