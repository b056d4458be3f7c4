"""The package's errors in one tree, grouped by what the caller can do about each.

::

    ElasticError
    ├── PolicyError                   a policy or a plan is impossible: the message names the field and the limit
    │   ├── UnsupportedBatchError     the cache cannot keep this batch: convert it in ``prepare``
    │   └── CacheDirectoryError       another user may enter the cache's directory: name another one
    ├── ControlPlaneUnavailableError  unknown: the control plane did not answer; retry
    │   ├── ControlPlaneRefusedError  it refused (wrong secret, a member of an old epoch): do not retry
    │   └── JobNotFoundError          no such job runs on this machine
    ├── StaleEpochError               the call belongs to an earlier world: wait for the next one
    ├── ControlDeadlineError          a rank did not reach the others within the given time
    ├── CursorError                   going on from this cursor would repeat or skip samples
    ├── StepOrderError                the loop takes a step before the last one was committed: fix the loop
    ├── DataWorkersLostError          processes that read samples died; iterating again starts new ones
    ├── CacheFullError                the cache was required, and the batch does not fit: enlarge it
    ├── PrepareError                  the user's ``prepare`` raised; its error is the cause, the batch is named
    ├── NonFiniteLossError            all ranks drop a step whose loss is not finite
    ├── UnhealthyProcessError         this process is unfit for another world: it ends, and a new one replaces it
    └── JobFailedError                the job cannot go on; the message says why, and how to resume

    WorldChanged (BaseException)      no error: the world of this attempt has ended, the train function returns

What a dataset raises reaches the caller with the worker's traceback in its message. A batch that is absent from the
cache, or damaged in it, raises nothing: it is prepared again and counted.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Root of everything this package raises on purpose."""


class PolicyError(ElasticError, ValueError):
    """Impossible as asked for; repeating it gives the same answer."""


class ControlPlaneUnavailableError(ElasticError):
    """The control plane could not be asked: what it wants is unknown."""


class ControlPlaneRefusedError(ControlPlaneUnavailableError):
    """The control plane knows this caller and says no."""


class JobNotFoundError(ControlPlaneUnavailableError):
    """No such job runs on this machine."""


class StaleEpochError(ElasticError):
    """What was said belongs to a world of the past."""


class ControlDeadlineError(ElasticError):
    """The time given was not enough."""


class NonFiniteLossError(ElasticError):
    """A loss that no rank may use."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final
        """Another attempt would end the same way."""

    def __reduce__(self) -> tuple[object, ...]:
        return _non_finite, (str(self), self.final)


def _non_finite(message: str, final: bool) -> NonFiniteLossError:
    return NonFiniteLossError(message, final=final)


class UnhealthyProcessError(ElasticError):
    """This process is not fit for another world."""


class JobFailedError(ElasticError):
    """The job cannot go on."""


class WorldChanged(BaseException):
    """The world of this attempt has ended; :func:`elastic.recoverable` enters the function again with the next one."""


class CursorError(ElasticError, ValueError):
    """Going on at this cursor would repeat or leave out samples."""


class StepOrderError(ElasticError):
    """Steps are taken in an order in which samples could get lost unnoticed."""


class DataWorkersLostError(ElasticError):
    """Processes that read samples died; nothing that was committed is affected."""


class UnsupportedBatchError(PolicyError):
    """A batch that is not made of tensors, numbers, text, bytes, lists, tuples and dicts."""


class CacheDirectoryError(PolicyError):
    """A directory that somebody else owns, or can enter."""


class CacheFullError(ElasticError):
    """No room for a batch: of the budget, or of the file system."""


class PrepareError(ElasticError):
    """``prepare`` raised for this batch; -1 where it was not known which one is next."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.index = index
        self.text = text

    def __str__(self) -> str:
        return f"{f'batch {self.index}' if self.index >= 0 else 'a batch'} could not be prepared: {self.text}"


class BatchDamagedError(Exception):
    """What lies there is not what was put; never leaves this package, since any batch can be prepared again."""
