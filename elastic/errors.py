"""The package's errors in one tree, grouped by the reaction of the caller.

::

    ElasticError
    ├── PolicyError                   a policy or a plan is impossible: the message names the field and the limit
    │   ├── UnsupportedBatchError     the cache cannot store this batch: convert it in ``prepare``
    │   └── CacheDirectoryError       another user can access the cache's directory: configure another one
    ├── ControlPlaneUnavailableError  the control plane did not answer, its state is unknown: retry
    │   ├── ControlPlaneRefusedError  it refused (wrong secret, a member of an old epoch): do not retry
    │   └── JobNotFoundError          no such job runs on this machine
    ├── StaleEpochError               the call belongs to an earlier world: wait for the next one
    ├── ControlDeadlineError          other ranks or the control plane did not answer within the timeout
    ├── CursorError                   to continue from this cursor would repeat or skip samples
    ├── StepOrderError                the loop takes a step before the last one was committed: fix the loop
    ├── DataWorkersLostError          processes that read samples died: a new iteration starts new ones
    ├── CacheFullError                the cache was required, and the batch does not fit: enlarge it
    ├── NonFiniteLossError            all ranks drop a step with a non-finite loss
    ├── ChunkDamagedError             a file of a batch inference job is damaged: remove it, it is computed again
    ├── UnhealthyProcessError         this process is unfit for another world: it exits, and a new one replaces it
    └── JobFailedError                the job cannot continue: the message has the reason, and how to resume

    WorldChanged (BaseException)      not an error: the world of this attempt has ended, the train function returns

Errors of a dataset reach the caller with the worker's traceback in their message. A batch that is absent from the
cache, or damaged in it, raises no error: it is prepared again and counted.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Base class of the package's errors."""


class PolicyError(ElasticError, ValueError):
    """An impossible request or setting: a retry fails in the same way."""


class ControlPlaneUnavailableError(ElasticError):
    """The control plane did not answer, so its state is unknown."""


class ControlPlaneRefusedError(ControlPlaneUnavailableError):
    """The control plane refused this caller."""


class JobNotFoundError(ControlPlaneUnavailableError):
    """No such job runs on this machine."""


class StaleEpochError(ElasticError):
    """A call for a world that has ended."""


class ControlDeadlineError(ElasticError):
    """A timeout of a control plane call."""


class NonFiniteLossError(ElasticError):
    """A loss that no rank may use."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final
        """Whether another attempt would end the same way."""

    def __reduce__(self) -> tuple[object, ...]:
        return _non_finite, (str(self), self.final)


def _non_finite(message: str, final: bool) -> NonFiniteLossError:
    return NonFiniteLossError(message, final=final)


class UnhealthyProcessError(ElasticError):
    """This process is unfit for another world."""


class ChunkDamagedError(ElasticError):
    """A file of a batch inference job differs from its checksum."""


class JobFailedError(ElasticError):
    """The job cannot continue."""


class WorldChanged(BaseException):
    """The world of this attempt has ended.

    :func:`elastic.recoverable` calls the function again in the next world.
    """


class CursorError(ElasticError, ValueError):
    """A cursor from which the data would repeat or skip samples."""


class StepOrderError(ElasticError):
    """An order of steps in which samples could be lost without notice."""


class DataWorkersLostError(ElasticError):
    """Processes that read samples died. Committed steps are not affected."""


class UnsupportedBatchError(PolicyError):
    """A batch that is not made of tensors, numbers, text, bytes, lists, tuples and dicts."""


class CacheDirectoryError(PolicyError):
    """A directory that another user owns or can access."""


class CacheFullError(ElasticError):
    """No room for a batch in the budget or in the file system."""


class BatchDamagedError(Exception):
    """A cached batch is damaged. Internal: the package prepares the batch again."""
