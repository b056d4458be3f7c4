"""The ``tieredckpt`` command: processes, help, errors, terminals."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.support.agents import agent_pid, stop_agent
from tests.support.jobs import CheckpointJob
from tieredckpt.cli import main
from tieredckpt.cli.exit_codes import ExitCode

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]

COMMANDS = [
    *(
        "agent",
        "ls",
        "status",
        "top",
        "whatif",
        "goodput",
        "monitoring",
        "simulate",
        "inspect",
        "verify",
        "export",
        "gc",
        "quarantine",
        "pin",
        "unpin",
        "rm",
        "rebuild",
        "doctor",
    ),
    "demo",
]


def run_command(*arguments, **more):
    command = [sys.executable, "-m", "tieredckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, **more)


def test_help_lists_every_command(cli):
    said = cli("--help")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.split("Commands:")[1].splitlines() if line.strip()][
        : len(COMMANDS)
    ] == COMMANDS
    assert "5  a tier is unavailable" in said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli, command):
    said = cli(command, "--help")
    assert said.code == 0
    assert f"tieredckpt {command}" in said.out
    if command in ("agent", "monitoring"):  # their commands have options and exit codes
        return
    if command != "demo":
        assert "Exit codes:" in said.out
    assert "--json" in said.out


def test_help_and_ls_need_no_torch(agent_dir):
    code = (
        "import sys, tieredckpt.cli; tieredckpt.cli.main(['--help']); tieredckpt.cli.main(['ls']); "
        "sys.exit('torch' in sys.modules or 'boto3' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_exit_codes_of_a_real_process(job):
    assert run_command("ls", "llama").returncode == 0
    missing = run_command("ls", "nothing")
    assert missing.returncode == 3
    assert missing.stdout == ""
    assert missing.stderr.startswith(
        "tieredckpt: tiered://nothing: no complete step found (nothing is saved in any tier)"
    )
    wrong = run_command("ls", "--wrong")
    assert wrong.returncode == 2
    assert "No such option" in wrong.stderr
    assert run_command("nonsense").returncode == 2
    assert run_command().returncode == 2
    assert run_command("--version").stdout.startswith("tieredckpt, version ")


def test_errors_are_a_single_message_and_debug_adds_a_traceback(cli, agent_dir):
    said = cli("ls", "llama")
    assert "Traceback" not in said.err
    said = cli("ls", "llama", "--debug")
    assert "Traceback" in said.err
    assert "TierUnavailableError" in said.err


def test_errors_are_json_too(cli, agent_dir):
    said = cli("verify", "llama", "--json")
    assert said.code == 5
    assert said.json["error"]["exit"] == 5
    assert "doctor" in said.json["error"]["advice"]


def test_closed_output_pipe_is_no_error(job):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "tieredckpt", "inspect", "llama"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert "Traceback" not in process.stderr
    assert "Error" not in process.stderr


def test_agent_command_runs_the_agent(agent_dir):
    process = subprocess.Popen(
        [sys.executable, "-m", "tieredckpt", "agent", "--dir", str(agent_dir), "--budget", "64MiB", "--http", "off"],
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "serves" in line:
            break
    assert agent_pid(agent_dir) == process.pid
    seen = run_command("ls", "--json")
    assert json.loads(seen.stdout) == {"jobs": [], "agent": True, "unreachable_agents": {}}
    assert run_command("ls").stdout == "no jobs\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stderr.close()
    assert run_command("agent", "--dir").returncode == 2


def test_progress_is_shown_on_a_terminal_only(job):
    def terminal_output(*arguments):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "tieredckpt", *arguments], stdout=subprocess.PIPE, stderr=theirs, text=True
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # how a terminal ends
                break
            if not data:
                break
            shown += data
        os.close(ours)
        out = process.stdout.read()
        process.stdout.close()
        assert process.wait() == 0
        return out, shown.decode()

    out, shown = terminal_output("verify", "llama", "--json")
    assert json.loads(out)["good"]
    assert "verifying llama" in shown
    assert run_command("verify", "llama").stderr == ""


def test_command_reads_the_settings_of_training(cli, agent_dir, durable, tmp_path, monkeypatch):
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(1)
    job.lose_memory()
    config = tmp_path / "cluster.yaml"
    config.write_text(f"durable: {{url: '{durable.url}'}}\nagent: {{directory: {agent_dir}}}\n")
    monkeypatch.setenv("TIEREDCKPT_CONFIG", str(config))
    assert [line["step"] for line in cli("ls", "llama", "--json").json["steps"]] == [1]


def test_an_agent_of_another_user_or_a_dead_socket(cli, agent_dir):
    import socket

    agent_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(agent_dir / "agent.sock"))
    assert cli("ls").code == ExitCode.UNAVAILABLE
    stop_agent(agent_dir)


def test_interrupted(monkeypatch, capsys):
    from tieredckpt.cli import ls

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "open_tier_client", interrupt)
    assert main(["ls"]) == 130
    assert "interrupted" in capsys.readouterr().err
