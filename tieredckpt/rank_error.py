"""Errors of one rank that the other ranks raise too, so that none of them waits for it."""

from __future__ import annotations

import msgspec

from tieredckpt.errors import SaveFailedError, TieredCheckpointError, errors_by_name


class RankError(msgspec.Struct, frozen=True):
    """Message and class of a rank's error, as sent to the other ranks; no error has no message."""

    message: str = ""
    kind: str = SaveFailedError.__name__

    @classmethod
    def of(cls, error: Exception) -> RankError:
        known = errors_by_name()
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in known), cls().kind)
        return cls(str(error) or type(error).__name__, kind)

    def error(self, context: str = "") -> TieredCheckpointError:
        """Return the error that the other ranks raise."""
        error = errors_by_name().get(self.kind, SaveFailedError)(f"{context}{self.message}")
        return error if isinstance(error, TieredCheckpointError) else SaveFailedError(f"{context}{self.message}")
