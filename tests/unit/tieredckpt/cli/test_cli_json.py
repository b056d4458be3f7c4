"""Every command that ends by itself prints JSON on request."""

import click
import pytest

import elastic.cli
import tieredckpt.cli
from integration.hyperpod.operator.sim_cli import operator_sim_cli
from integration.sagemaker.convert import convert_command

PROGRAMS = {
    "tieredckpt": tieredckpt.cli.tieredckpt_cli,
    "elastic": elastic.cli.elastic_commands,
    "hyperpod-operator-sim": operator_sim_cli,
    "convert": convert_command,
}
SERVERS = {"tieredckpt agent run", "elastic run", "elastic join", "elastic coordinator"}
"""They run until they are stopped, and write logs."""


def commands(command, path):
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), f"{path} {name}")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_has_a_json_option(program):
    found = dict(commands(PROGRAMS[program], program))
    without = {path for path, one in found.items() if not any("--json" in param.opts for param in one.params)}
    assert without == SERVERS & found.keys()
