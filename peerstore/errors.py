"""The package's errors, grouped by what the caller can do about each; they travel between processes by name.

::

    PeerStoreError
    ├── RequestError            the call itself is wrong: fix it, retrying does not help
    │   ├── InvalidNameError        a job name that could not be a file name
    │   ├── ProtocolError           a frame nobody who follows the protocol would send
    │   └── PeerRefusedError        a peer that could not prove that it belongs to the job, or to which we could not
    ├── ShardNotFoundError      absent: ask the next tier
    ├── ShardDamagedError       the bytes are not what was sealed: use another copy, report it
    ├── UnsupportedFormatError      another version of this package wrote it: kept as it is
    ├── UnavailableError        unknown, not absent: retry, or ask somebody else
    │   ├── AgentUnreachableError   nobody answers on the socket
    │   ├── PeerUnreachableError    another node's agent does not answer, or too slowly
    │   ├── JobNotJoinedError       another node's agent has the job's secret and has not joined it: invite it first
    │   ├── ShardUnreadableError    the shard is kept and cannot be read for now (descriptors, memory, I/O): ask another
    │   ├── NoQuorumError           this node sees too few of the job's nodes to decide alone
    │   └── ArenaBusyError          every slot is in use for now; wait or skip this save
    │       ├── AgentBusyError          the agent has as much to do as it has files for: ask again
    │       └── ShardPendingError       what was offered is here and not verified, or on its way: ask again
    ├── ArenaFullError          the budget or the machine is too small: enlarge it or save less
    └── FencedError             a newer incarnation owns the job: stop writing
        └── LeaseLostError          this lease is gone (expired, fenced, never given)

All of them travel over the wire by class name and message, and pickle.
"""

from __future__ import annotations


class PeerStoreError(Exception):
    """Root of everything this package raises on purpose."""


class RequestError(PeerStoreError):
    """The call is wrong; repeating it gives the same answer."""


class InvalidNameError(RequestError):
    """A job name outside ``[A-Za-z0-9._-]{1,128}``, or one that means a directory."""


class ProtocolError(RequestError):
    """The other side sent something that is not this protocol."""


class PeerRefusedError(RequestError):
    """One of two agents did not accept the other: another secret, another job, another certificate."""


class ShardNotFoundError(PeerStoreError):
    """No such sealed shard here. Absent, not unknown."""


class ShardDamagedError(PeerStoreError):
    """The bytes do not match the checksums taken when the shard was sealed."""


class UnsupportedFormatError(PeerStoreError):
    """Intact, and nothing that this version writes. Another version does, so that it is kept."""


class UnavailableError(PeerStoreError):
    """The answer is not known right now; it may be later."""


class AgentUnreachableError(UnavailableError):
    """The node agent does not answer and could not be started."""


class PeerUnreachableError(UnavailableError):
    """Another node's agent does not answer: down, cut off or too slow. What it holds is not known."""


class JobNotJoinedError(UnavailableError):
    """Another node's agent knows the job's secret, but has not joined the job yet."""


class ShardUnreadableError(UnavailableError):
    """The shard is here and cannot be read for now: too many open files, no memory, an I/O error. That is no damage."""


class NoQuorumError(UnavailableError):
    """Fewer than half of the job's nodes are seen from here, so this side of a partition must not decide alone."""


class ArenaBusyError(UnavailableError):
    """Every slot holds something that may not be given up yet."""


class AgentBusyError(ArenaBusyError):
    """The agent is near its limit of open files: it finishes what it has begun, and takes on nothing new for now."""


class ShardPendingError(ArenaBusyError):
    """There is no lack of room: the shard has one already, and is not readable yet."""


class ArenaFullError(PeerStoreError):
    """What was asked for does not fit the budget or the machine."""


class FencedError(PeerStoreError):
    """A newer incarnation of the job has taken over; this writer is of the past."""


class LeaseLostError(FencedError):
    """The lease is not known (any more)."""


def _tree(root: type[PeerStoreError]) -> dict[str, type[PeerStoreError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def error_from_wire(name: str, message: str) -> PeerStoreError:
    """The error another process raised, or the root class when its name is not ours."""
    kind = _tree(PeerStoreError).get(name)
    return kind(message) if kind else PeerStoreError(f"{name}: {message}")
