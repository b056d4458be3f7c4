"""The environment that recovery within a process needs of NCCL (:mod:`tieredckpt.nccl_environment`), set or refused."""

from __future__ import annotations

from collections.abc import MutableMapping

from elastic.errors import PolicyError
from tieredckpt.nccl_environment import State, examined


def leave_errors_to_us(environ: MutableMapping[str, str]) -> None:
    """Before the first group: set what is not set; :class:`PolicyError` where something contradicts it."""
    found = examined(environ)
    wrong = [one for one in found if one.state is State.CONTRADICTED]
    if wrong:
        said = "; ".join(f"{one}: {one.why}" for one in wrong)
        raise PolicyError(
            f"{said}. Unset {' and '.join(one.name for one in wrong)}; without recovery in the process use torchrun"
        )
    for one in found:
        if one.state is State.UNSET:
            environ[one.name] = one.value
