"""Errors of the package, grouped by the possible reactions of the caller.

::

    TieredCheckpointError
    ├── UsageError                  the call or the configuration is wrong: fix it
    │   ├── SettingsError               bad keys of a configuration, all in one message
    │   ├── MissingStepError            a save names no training step
    │   ├── MismatchError               the state and the checkpoint differ in shape, dtype or names
    │   ├── UntrustedObjectError        an object is more than data: allow its class, or trust its writer
    │   ├── FormatVersionError          written by a newer release: upgrade
    │   └── PluginError                 a plug-in cannot be loaded: reinstall it or remove it
    ├── CheckpointNotFoundError     absent: no such complete step exists; the caller decides about a fresh start
    │   ├── CheckpointTornError         a step was never complete: no complete step is lost
    │   └── EventLogNotFoundError         the job has no event log
    ├── TierUnavailableError        unknown: a tier did not answer; retry, do not start fresh
    │   ├── StoreBusyError              the store throttles, or a slot or an upload is in use
    │   ├── PeersLostError              the nodes that held some of the bytes failed during a read
    │   └── CheckpointDeletedError      retention deleted the step during a read: newer steps exist
    ├── CheckpointDamagedError      bytes differ from the saved ones, and no good copy exists
    ├── CheckpointLostError         a step was complete, and the nodes that answer lack parts of it
    ├── RestoreProofError           after a restore the live state differs from the saved one: do not train on it
    ├── DurableRefusedError         the object store refuses (credentials, permission, no such bucket)
    └── SaveFailedError             this save failed; training can continue and the newest complete step remains
        ├── JobTakenOverError           another process with the job's name saves now: stop one of the two
        └── NonFiniteStateError         the state has NaN or new infinities: restore the newest step

The agent's socket carries them by class name. They can be pickled, and DCP may wrap them in ``CheckpointException``.
"""

from __future__ import annotations


class TieredCheckpointError(Exception):
    """Base class of the errors of this package."""


class UsageError(TieredCheckpointError):
    """The call or the configuration is wrong; a retry fails the same way."""


class SettingsError(UsageError):
    """One or more settings are wrong; the message names every key."""


class MissingStepError(UsageError):
    """A save names no training step."""


class MismatchError(UsageError):
    """The state to fill and the saved state do not match."""


class UntrustedObjectError(UsageError):
    """Loading an entry would call code that the entry names and the user has not allowed."""


class FormatVersionError(UsageError):
    """The data has a format that this release does not know."""


class PluginError(UsageError):
    """A plug-in of another package cannot be loaded."""


class CheckpointNotFoundError(TieredCheckpointError):
    """No tier has the requested complete step, and every tier answered."""


class CheckpointTornError(CheckpointNotFoundError):
    """A step was started and never complete, as far as the tiers know. No complete step is lost."""


class EventLogNotFoundError(CheckpointNotFoundError):
    """The event log does not exist or is empty."""


class TierUnavailableError(TieredCheckpointError):
    """A tier did not answer. Its contents are unknown, which differs from empty."""


class StoreBusyError(TierUnavailableError):
    """The store throttles, or a slot or an upload is in use. Retry later."""


class PeersLostError(TierUnavailableError):
    """All nodes that held some of the bytes failed during a read. Resolve the step again."""


class CheckpointDeletedError(TierUnavailableError):
    """Retention deleted the step during a read. Resolve the step again: newer steps exist."""


class CheckpointDamagedError(TieredCheckpointError):
    """Bytes differ from the saved ones, and no good copy was found."""


class CheckpointLostError(TieredCheckpointError):
    """A step was complete, and no node that answers has some of its parts.

    It is neither absent nor damaged.
    """


class RestoreProofError(TieredCheckpointError):
    """Entries of the live state differ from the saved ones, although their bytes were read correctly."""


class DurableRefusedError(TieredCheckpointError):
    """The object store refused the request."""


class SaveFailedError(TieredCheckpointError):
    """The step was not saved, or not to every requested tier."""


class JobTakenOverError(SaveFailedError):
    """Another process with the job's name has begun to save, so this one can no longer save."""


class NonFiniteStateError(SaveFailedError):
    """A tensor of the state became NaN or infinite. The step does not replace the last finite one."""


def errors_by_name() -> dict[str, type[Exception]]:
    """Return the error classes of this module by name, for the agent's client."""
    found: dict[str, type[Exception]] = {}
    pending: list[type[TieredCheckpointError]] = [TieredCheckpointError]
    while pending:
        kind = pending.pop()
        if kind.__module__ == __name__:
            found[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return found
