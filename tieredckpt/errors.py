"""The package's errors, grouped by what the caller can do about each.

::

    TieredCheckpointError
    ├── UsageError                  the call or the configuration is wrong: fix it
    │   ├── SettingsError               every bad key of a configuration, all at once
    │   ├── MissingStepError            a save that does not say which step it is
    │   ├── MismatchError               the state and the checkpoint differ in shape, dtype or names
    │   ├── UntrustedObjectError        an object that is more than data: allow its class, or trust who wrote it
    │   ├── FormatVersionError          written by a newer release: upgrade
    │   └── PluginError                 what another package adds cannot be loaded: install it anew, or without it
    ├── CheckpointNotFoundError     absent: there is no such (whole) step; starting fresh is a decision, not an accident
    │   ├── CheckpointTornError         a step was begun and never came to be whole: nothing that was whole is lost
    │   └── EventLogNotFoundError         nothing was written down of such a job
    ├── TierUnavailableError        unknown: a tier could not be asked; retry, do not start fresh
    │   ├── StoreBusyError              the store asks to slow down, or a slot or an upload is still in use
    │   ├── PeersLostError              the nodes that held some of the bytes went away while they were read
    │   └── CheckpointDeletedError      retention deleted the step while it was read: newer ones are there
    ├── CheckpointDamagedError      bytes are not what was saved, and no other copy of them is left
    ├── CheckpointLostError         there was a whole step, and no node that answers has all of it any more
    ├── RestoreProofError           after a restore the live state is not what was saved: do not train on it
    ├── DurableRefusedError         the object store says no (credentials, permission, no such bucket)
    └── SaveFailedError             this save did not happen; training may go on and the last whole step is kept
        └── NonFiniteStateError         the state has NaN, or infinities that were not there: go back to the last step

They travel over the agent's socket by class name, pickle, and are found inside DCP's ``CheckpointException``.
"""

from __future__ import annotations


class TieredCheckpointError(Exception):
    """Root of everything this package raises on purpose."""


class UsageError(TieredCheckpointError):
    """The call or the configuration is wrong; repeating it gives the same answer."""


class SettingsError(UsageError):
    """One or more settings are wrong; the message names every key."""


class MissingStepError(UsageError):
    """A save has to say which training step it belongs to."""


class MismatchError(UsageError):
    """What is to be filled and what was saved do not fit each other."""


class UntrustedObjectError(UsageError):
    """Loading an entry would call what the entry names, which nobody has allowed."""


class FormatVersionError(UsageError):
    """Written in a format this release does not know."""


class PluginError(UsageError):
    """What another package adds to this one cannot be loaded."""


class CheckpointNotFoundError(TieredCheckpointError):
    """No whole step as asked for in any tier, and every tier could be asked."""


class CheckpointTornError(CheckpointNotFoundError):
    """A step was begun and never came to be whole, as far as anybody knows: nothing that was whole is lost."""


class EventLogNotFoundError(CheckpointNotFoundError):
    """There is no event log there, or nothing in it yet."""


class TierUnavailableError(TieredCheckpointError):
    """A tier could not be asked: what it holds is unknown, which is not the same as nothing."""


class StoreBusyError(TierUnavailableError):
    """Try again later."""


class PeersLostError(TierUnavailableError):
    """Every node that held some of the bytes went away while they were read: look again what there is."""


class CheckpointDeletedError(TierUnavailableError):
    """The step was deleted while it was read, because newer ones are kept: look again what there is."""


class CheckpointDamagedError(TieredCheckpointError):
    """Bytes differ from what was saved and no good copy of them was found."""


class CheckpointLostError(TieredCheckpointError):
    """A step was whole once, and parts of it are on no node that answers: neither absent nor damaged."""


class RestoreProofError(TieredCheckpointError):
    """Entries of the live state are not what was saved, although good bytes were read for them."""


class DurableRefusedError(TieredCheckpointError):
    """The object store answered, and the answer is no."""


class SaveFailedError(TieredCheckpointError):
    """The step was not saved (or not to every tier asked for)."""


class NonFiniteStateError(SaveFailedError):
    """A tensor of the state has become NaN or infinite, so it does not take the place of a step that is finite."""


def errors_by_name() -> dict[str, type[Exception]]:
    """Every class above by name, for the agent's client."""
    found: dict[str, type[Exception]] = {}
    pending: list[type[TieredCheckpointError]] = [TieredCheckpointError]
    while pending:
        kind = pending.pop()
        if kind.__module__ == __name__:
            found[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return found
