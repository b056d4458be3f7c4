"""One way to run a command: exit codes, errors as one message or as JSON, interrupts and closed pipes."""

import json
import os
import subprocess
import sys

import click
import pytest

import elastic.cli
import integration.hyperpod.operator.sim_cli
import integration.sagemaker.convert
import tieredckpt.cli
from elastic import errors as elastic_errors
from elastic.cli.common import ElasticScreen
from peerstore import errors as store_errors
from tieredckpt import errors
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.run_program import run_program


def raising(error, screen=None):
    @click.command()
    def fail():
        raise error

    return run_program(fail, screen or CommandOutput("program"), [])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (elastic_errors.PolicyError("x"), 2),
        (errors.SettingsError("x"), 2),
        (elastic_errors.JobNotFoundError("x"), 3),
        (errors.CheckpointDamagedError("x"), 4),
        (elastic_errors.ControlPlaneUnavailableError("x"), 5),
        (store_errors.AgentUnreachableError("x"), 5),
        (elastic_errors.ControlPlaneRefusedError("x"), 6),
        (store_errors.PeerRefusedError("x"), 6),
        (elastic_errors.JobFailedError("x"), 8),
        (elastic_errors.ElasticError("x"), 1),
        (OSError("x"), 1),
    ],
)
def test_elastic_errors_have_codes_in_the_same_table(error, code, capsys):
    assert raising(error, ElasticScreen("elastic")) == code
    assert capsys.readouterr().err.startswith("elastic: x\n")


def test_broken_pipe_of_a_connection_is_an_error(capsys):
    assert raising(BrokenPipeError(32, "Broken pipe")) == 1
    assert capsys.readouterr().err == "program: [Errno 32] Broken pipe\n"


def test_closed_standard_output_is_not_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tieredckpt", "simulate", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_has_its_own_code(capsys):
    assert raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (tieredckpt.cli.main, ["ls", "--jso", "--json"]),
        (elastic.cli.main, ["status", "--jb", "x", "--json"]),
        (integration.hyperpod.operator.sim_cli.main, ["status", "--jb", "x", "--json"]),
        (integration.sagemaker.convert.main, ["--json"]),
    ],
)
def test_wrong_command_lines_are_json_too(main, words, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (error["exit"], error["advice"]) == (2, "")
    assert f"Error: {error['message']}" in said.err


def test_command_line_is_kept_as_given():
    screen = CommandOutput("program")
    assert run_program(click.Command("c", params=[click.Argument(["x"])], callback=lambda x: 0), screen, ["one"]) == 0
    assert screen.argv == ["one"]
