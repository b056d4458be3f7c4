"""Every error has an exit code; absent, damaged, unknown and refused have different ones."""

import pytest

from peerstore import errors as store_errors
from tieredckpt import errors
from tieredckpt.cli.exits import EXIT_HELP, Exit, advice_for, exit_for, worst


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
    assert exit_for(error) == code


def test_every_error_of_the_package_has_a_code():
    own = {name: kind for name, kind in errors.wire_errors().items() if kind.__module__.startswith("tieredckpt.")}
    codes = {name: exit_for(kind("x")) for name, kind in own.items()}
    assert {name for name, code in codes.items() if code is Exit.FAILED} == {
        "TieredCheckpointError",
        "SaveFailedError",
        "NonFiniteStateError",
        "RestoreProofError",  # of a job's own process, never of a command
    }


def test_what_to_do_is_said_where_the_message_cannot_know():
    assert "tieredckpt agent" in advice_for(store_errors.AgentUnreachableError("x"))
    assert "doctor" in advice_for(errors.DurableRefusedError("x"))
    assert advice_for(errors.UsageError("x")) == ""


def test_damage_outweighs_the_unknown():
    assert worst([]) is Exit.OK
    assert worst([Exit.OK, Exit.OK]) is Exit.OK
    assert worst([Exit.OK, Exit.UNAVAILABLE]) is Exit.UNAVAILABLE
    assert worst([Exit.UNAVAILABLE, Exit.DAMAGED, Exit.OK]) is Exit.DAMAGED


def test_help_documents_every_code():
    for code in Exit:
        if code is not Exit.INTERRUPTED:
            assert f"\n  {int(code)}  " in EXIT_HELP
