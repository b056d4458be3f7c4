"""What can go wrong with a world of ranks, sorted by what the caller can do about it.

::

    ElasticError
    ├── PolicyError                 a policy or a plan is impossible: the message names the field and the limit; fix it
    │   ├── prepared.BatchKindError     a batch that the cache cannot keep
    │   └── prepared.CachePlaceError    a directory for it that somebody else may enter
    ├── ControlLostError            unknown: the control plane could not be asked; retry
    │   └── RefusedError                it was asked and says no (wrong secret, a member of an old epoch): do not retry
    ├── StaleEpochError             what was said belongs to a world of the past: wait for the new one
    ├── DeadlineError               a rank did not get to where all others are within the time given
    ├── samples.CursorError         going on here would repeat or leave out samples
    ├── samples.StepError           steps are taken in an order in which samples could get lost unnoticed
    ├── samples.WorkersLostError    processes that read samples died; nothing committed is affected
    ├── prepared.CacheFullError     no room for a prepared batch
    ├── prepared.PrepareError       what makes a batch raised, for this one
    ├── NonFiniteLossError          a loss that no rank may use: the step is dropped by all of them
    ├── UnhealthyError              this process is not fit for another world: it ends, and a new one takes its seat
    └── GaveUpError                 the job cannot go on; says after what, and how to resume

    WorldChanged (BaseException)    not an error: the world of this attempt has ended, the train function is left

"""

from __future__ import annotations


class ElasticError(Exception):
    """Root of everything this package raises on purpose."""


class PolicyError(ElasticError, ValueError):
    """Impossible as asked for; repeating it gives the same answer."""


class ControlLostError(ElasticError):
    """The control plane could not be asked: what it wants is unknown."""


class RefusedError(ControlLostError):
    """The control plane knows this caller and says no."""


class StaleEpochError(ElasticError):
    """What was said belongs to a world of the past."""


class DeadlineError(ElasticError):
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


class UnhealthyError(ElasticError):
    """This process is not fit for another world."""


class GaveUpError(ElasticError):
    """The job cannot go on."""


class WorldChanged(BaseException):
    """The world of this attempt has ended; :func:`elastic.recoverable` enters the function again with the next one."""
