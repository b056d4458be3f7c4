"""Errors of the package, grouped by the reaction that they call for.

::

    PeerStoreError
    ├── RequestError            the call itself is wrong: fix it, retrying does not help
    │   ├── InvalidNameError        a job name that is not allowed as a file name
    │   ├── MissingPackageError     an optional package is not installed: install the extra that the message names
    │   ├── ProtocolError           a frame that violates the protocol
    │   └── PeerRefusedError        one side could not prove to the other that it belongs to the job
    ├── ShardNotFoundError      absent: read from the next tier
    ├── ShardDamagedError       the bytes are not the sealed ones: use another copy, report the damage
    ├── UnsupportedFormatError      another release of this package wrote it: it stays unchanged
    ├── UnavailableError        unknown, not absent: retry, or use another source
    │   ├── AgentUnreachableError   no agent answers on the socket
    │   ├── PeerUnreachableError    another node's agent does not answer, or too slowly
    │   ├── JobNotJoinedError       another node's agent has the job's secret and has not joined it: invite it first
    │   ├── ShardUnreadableError    the shard exists and cannot be read now (descriptors, memory, I/O): use another copy
    │   ├── NoQuorumError           this node sees too few of the job's nodes to decide alone
    │   └── ArenaBusyError          every slot is in use now; wait or skip this save
    │       ├── AgentBusyError          the agent is near its limit of open files: retry
    │       └── ShardPendingError       the offered shard is not verified yet, or is being received: retry
    ├── ArenaFullError          the budget or the machine is too small: enlarge it or save less
    └── FencedError             a newer incarnation owns the job: stop writing
        └── LeaseLostError          this lease does not exist (expired, fenced, never granted)

All of them are sent by class name and message, and can be pickled.
"""

from __future__ import annotations


class PeerStoreError(Exception):
    """Base class of all errors that this package raises on purpose."""


class RequestError(PeerStoreError):
    """The call is wrong; a retry fails in the same way."""


class InvalidNameError(RequestError):
    """A job name outside ``[A-Za-z0-9._-]{1,128}``, or one of dots only."""


class MissingPackageError(RequestError, ImportError):
    """A package that only an extra installs is missing, or has the wrong version."""


class ProtocolError(RequestError):
    """The other side violated the protocol."""


class PeerRefusedError(RequestError):
    """One agent refused the other: another secret, job or certificate."""


class ShardNotFoundError(PeerStoreError):
    """The sealed shard is absent on this node, not unknown."""


class ShardDamagedError(PeerStoreError):
    """The bytes do not match the checksums taken when the shard was sealed."""


class UnsupportedFormatError(PeerStoreError):
    """Intact data of another release of this package; it stays unchanged."""


class UnavailableError(PeerStoreError):
    """The answer is unknown now; a retry may succeed."""


class AgentUnreachableError(UnavailableError):
    """The node agent does not answer and could not be started."""


class PeerUnreachableError(UnavailableError):
    """Another node's agent does not answer: down, disconnected or too slow. Its shards are unknown."""


class JobNotJoinedError(UnavailableError):
    """Another node's agent knows the job's secret, but has not joined the job yet."""


class ShardUnreadableError(UnavailableError):
    """The shard exists and is not damaged, but cannot be read now.

    Possible causes are too many open files, too little memory, and I/O errors.
    """


class NoQuorumError(UnavailableError):
    """This node sees too few of the job's nodes, so this side of a partition must not decide alone."""


class ArenaBusyError(UnavailableError):
    """Every slot has contents that must not be evicted now."""


class AgentBusyError(ArenaBusyError):
    """The agent is near its limit of open files: it finishes work in progress and refuses new work."""


class ShardPendingError(ArenaBusyError):
    """Memory suffices, but the shard's slot is not readable yet."""


class ArenaFullError(PeerStoreError):
    """The request does not fit into the budget or the machine."""


class FencedError(PeerStoreError):
    """A newer incarnation of the job has taken over; this writer must stop."""


class LeaseLostError(FencedError):
    """The lease does not exist, or no longer exists."""


def _tree(root: type[PeerStoreError]) -> dict[str, type[PeerStoreError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def error_from_wire(name: str, message: str) -> PeerStoreError:
    """Return the error that another process raised, or the base class for an unknown name."""
    kind = _tree(PeerStoreError).get(name)
    return kind(message) if kind else PeerStoreError(f"{name}: {message}")
