"""Every error has an exit code; absent, damaged, unknown and refused have different ones."""

import pytest

from elastic.cli.common import ELASTIC_EXIT_HELP
from peerstore import errors as store_errors
from tieredckpt import errors
from tieredckpt.cli.exit_codes import EXIT_CODES_HELP, ExitCode, exit_code_for, hint_for, worst_exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.SettingsError("x"), 2),
        (errors.FormatVersionError("x"), 2),
        (store_errors.InvalidNameError("x"), 2),
        (errors.CheckpointNotFoundError("x"), 3),
        (store_errors.ShardNotFoundError("x"), 3),
        (errors.CheckpointDamagedError("x"), 4),
        (errors.CheckpointLostError("x"), 4),
        (store_errors.ShardDamagedError("x"), 4),
        (errors.TierUnavailableError("x"), 5),
        (errors.StoreBusyError("x"), 5),
        (store_errors.AgentUnreachableError("x"), 5),
        (errors.DurableRefusedError("x"), 6),
        (errors.SaveFailedError("x"), 1),
        (store_errors.ArenaFullError("x"), 1),
        (OSError("x"), 1),
    ],
)
def test_codes(error, code):
    assert exit_code_for(error) == code


def test_every_error_of_the_package_has_a_code():
    own = {name: kind for name, kind in errors.errors_by_name().items() if kind.__module__.startswith("tieredckpt.")}
    codes = {name: exit_code_for(kind("x")) for name, kind in own.items()}
    assert {name for name, code in codes.items() if code is ExitCode.FAILED} == {
        "TieredCheckpointError",
        "SaveFailedError",
        "JobTakenOverError",
        "NonFiniteStateError",
        "RestoreProofError",  # of a job's own process, never of a command
    }


def test_hint_is_given_where_the_message_has_none():
    assert "tieredckpt agent" in hint_for(store_errors.AgentUnreachableError("x"))
    assert "doctor" in hint_for(errors.DurableRefusedError("x"))
    assert hint_for(errors.UsageError("x")) == ""


def test_damage_outweighs_the_unknown():
    assert worst_exit_code([]) is ExitCode.OK
    assert worst_exit_code([ExitCode.OK, ExitCode.OK]) is ExitCode.OK
    assert worst_exit_code([ExitCode.OK, ExitCode.UNAVAILABLE]) is ExitCode.UNAVAILABLE
    assert worst_exit_code([ExitCode.UNAVAILABLE, ExitCode.DAMAGED, ExitCode.OK]) is ExitCode.DAMAGED


def test_help_documents_every_code():
    for code in ExitCode:
        if code is not ExitCode.INTERRUPTED:
            shown = ELASTIC_EXIT_HELP if code in (ExitCode.STOPPED, ExitCode.JOB_FAILED) else EXIT_CODES_HELP
            assert f"\n  {int(code)}  " in shown
