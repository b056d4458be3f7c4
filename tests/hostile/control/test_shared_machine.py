"""Security of ``elastic run`` on a machine with other users: sockets, imports, trust and file modes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from elastic.cli import main, run
from elastic.control import child_processes
from elastic.control.child_processes import python_module_command, with_import_path
from elastic.control.run_directory import LocalRun, RunDirectory, derive_peer_secret, list_runs
from elastic.errors import ControlPlaneUnavailableError
from tests.support.elastic_runs import ROOT, elastic_job
from tests.support.local_nodes import wait_until
from tieredckpt.agent.peer_config import peer_secret
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.settings import load_settings

SECRET = "everybody who lists processes reads this"

TRAINING = """
import pathlib, sys, time
import torch.distributed as dist
import elastic

FOLDER = pathlib.Path(sys.argv[1])

@elastic.recoverable
def train(world):
    dist.barrier()
    (FOLDER / f"in-{world.rank}").touch()
    while not (FOLDER / "finish").exists():
        time.sleep(0.02)

train()
"""

PLANTED = """
import pathlib, sys
with open({marker!r}, "a") as marker:
    print({name!r}, *sys.argv[1:2], file=marker)
"""


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


def listening_addresses(folder: Path) -> dict[str, str]:
    """Return the addresses on which a job's processes listen, with their commands."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"ELASTIC_RUN_DIRECTORY={folder / 'run'}".encode() not in (process / "environ").read_bytes():
                continue
            sockets = {os.readlink(fd) for fd in (process / "fd").iterdir()}  # noqa: PTH115 - it is no path
            for table in ("tcp", "tcp6"):
                for line in (process / "net" / table).read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found[decode_address(fields[1])] = command[:200]
    return found


def decode_address(raw: str) -> str:
    digits, _, port = raw.partition(":")
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return f"{ipaddress.ip_address(b''.join(words))} {int(port, 16)}"


@pytest.mark.e2e
@pytest.mark.parametrize("store", ["single", "rootless"])
def test_single_machine_job_listens_only_on_loopback(job, store):
    script = job.folder / "train.py"
    script.write_text(TRAINING)
    run = job.start("run", "--no-agent", "--simulate-nodes", "2", "--nnodes", "2", "--store", store, "--log-dir",
                    str(job.folder / "logs"), str(script), str(job.folder))  # fmt: skip
    wait_until(lambda: (job.folder / "in-0").exists() and (job.folder / "in-1").exists(), timeout_s=60)
    found = listening_addresses(job.folder)
    job.finish()
    assert job.wait_ended(run) == 0, job.output()
    assert len(found) >= 4  # the coordinator, the store, and the ranks' groups
    elsewhere = {
        where: what
        for where, what in found.items()
        if not (ip := ipaddress.ip_address(where.split()[0])).is_loopback
        and not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
    }
    assert elsewhere == {}


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_working_directory_is_not_imported_from(job, tmp_path, ranks):
    marker = tmp_path / "imported"
    for name in ("msgspec", "torch", "queue", "tieredckpt", "elastic"):
        (job.folder / f"{name}.py").write_text(PLANTED.format(marker=str(marker), name=name))
    script, command = tmp_path / "train.py", tmp_path / "bin" / "elastic"
    script.write_text(TRAINING)
    command.parent.mkdir()
    command.write_text("import sys\nfrom elastic.cli import main\nsys.exit(main(sys.argv[1:]))\n")  # as it is installed
    job.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(tmp_path / "agent")
    words = ["run", "--nproc", str(ranks), "--log-dir", str(tmp_path / "logs"), str(script), str(job.folder)]
    with (tmp_path / "output").open("wb") as out:
        run = subprocess.Popen(
            [sys.executable, str(command), *words], cwd=job.folder, env=job.environ, stdout=out, stderr=out
        )
    job.started.append(run)
    wait_until(lambda: (job.folder / "in-0").exists() or run.poll() is not None or marker.exists(), timeout_s=60)
    job.finish()
    assert not marker.exists(), marker.read_text()
    assert job.wait_ended(run) == 0, (tmp_path / "output").read_text()


def test_module_runs_like_with_python_m(tmp_path, monkeypatch):
    """Python 3.10 cannot leave the folder out by itself."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from here')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "shown.py").write_text("import sys, msgspec; print(__name__, sys.argv[1:], sys.path[0])")
    environ = with_import_path({**os.environ, "PYTHONPATH": f"{tmp_path / 'package'}{os.pathsep}"})
    commands = (
        python_module_command("shown", "a", "b"),
        [sys.executable, "-c", child_processes._BY_HAND, "shown", "a", "b"],
    )
    runs = [
        subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        for command in commands
    ]
    assert [one.stdout for one in runs] == [f"__main__ ['a', 'b'] {ROOT}\n"] * 2, runs


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--coordinator", "127.0.0.1:1", "--secret", SECRET, "train.py"),
        ("coordinator", "--listen", "127.0.0.1:0", "--job", "j", "--secret", SECRET),
        ("status", "--job", "j", "--coordinator", "127.0.0.1:1", "--secret", SECRET),
    ],
    ids=lambda words: words[0],
)
def test_secret_on_the_command_line_is_refused_and_not_printed(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ELASTIC_RUN_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(list(words)) == ExitCode.USAGE
    output = capsys.readouterr()
    assert SECRET not in output.out + output.err
    assert "file:/path" in output.err
    assert not (tmp_path / "run").exists()


# -- trust ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_directory(tmp_path):
    one = RunDirectory(tmp_path / "run", "job")
    one.prepare()
    one.write(LocalRun("job", "127.0.0.1:1", str(one.write_secret(None)), 1, 0, ("true",), "/", "/", 1.0))
    return one


def test_run_directory_is_trusted_only_when_private(run_directory):
    assert run_directory.read().job == "job"
    for folder in (run_directory.root, run_directory.directory):
        folder.chmod(0o777)
        with pytest.raises(ControlPlaneUnavailableError, match="that no other user can write to"):
            run_directory.read()
        folder.chmod(0o700)
    assert [run.job for run in list_runs(run_directory.root)] == ["job"]
    run_directory.root.chmod(0o777)
    with pytest.raises(ControlPlaneUnavailableError, match=r"ELASTIC_RUN_DIRECTORY"):
        list_runs(run_directory.root)


def test_run_directory_of_another_user_is_not_trusted(run_directory):
    if os.getuid() != 0:
        pytest.skip("only root can make what belongs to another user")
    os.chown(run_directory.root, 54321, 54321)
    with pytest.raises(ControlPlaneUnavailableError, match="belongs to user 54321"):
        run_directory.read()


@pytest.mark.parametrize("kind", ["fifo", "link", "socket", "folder"])
def test_non_file_does_not_block_reading(run_directory, kind, tmp_path):
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(msgspec.json.encode(run_directory.read()))
    run_directory.file.unlink()
    if kind == "fifo":
        os.mkfifo(run_directory.file)
    elif kind == "link":
        run_directory.file.symlink_to(elsewhere)
    elif kind == "folder":
        run_directory.file.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(run_directory.file))
    found = []

    def read():
        with pytest.raises(ControlPlaneUnavailableError, match="cannot be read"):
            run_directory.read()
        found.append(True)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(20)
    assert found == [True]


# -- proofs of agents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["10.0.0.7", "127.0.0.1"])
@pytest.mark.parametrize("configured", ["", "a secret of the agents' own"])
def test_agents_prove_a_secret_derived_from_the_jobs(run_directory, monkeypatch, configured, address):
    """Otherwise the ranks would exchange a secret through the store where they meet."""
    monkeypatch.setattr(run, "node_address", lambda *_: address)
    if configured:
        monkeypatch.setenv("TIEREDCKPT_PEER_SECRET", configured)
    options = {"simulate_nodes": None, "coordinator": "10.0.0.1:7", "coordinator_here": False, "agent": True}
    task = run._supervisor_spec(run_directory, run_directory.read(), "n1", {**options, "node": "", "verbose": 0})
    settings = load_settings({**os.environ, **task.environ})
    derived = derive_peer_secret(run_directory.secret_file.read_bytes(), "job")
    assert peer_secret(settings.peer) == (configured.encode() or derived)
    if not configured:
        path = Path(settings.peer.secret.removeprefix("file:"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert run_directory.secret_file.read_text() not in path.read_text()
