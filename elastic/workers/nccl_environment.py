"""What NCCL's watchdog may do while a process recovers by itself: nothing.

By default torch's watchdog ends the process when a peer is lost, or aborts the communicator before anybody has asked
which device work was complete. Who runs the job hears of a lost rank sooner, and aborts all groups of all ranks.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from elastic.errors import PolicyError

_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""The second one is an older name, which torch reads as well."""
_OFF = "0"
_SET = {_HANDLING[0]: _OFF, "TORCH_NCCL_ENABLE_MONITORING": _OFF}


def leave_errors_to_us(environ: MutableMapping[str, str]) -> None:
    """Before the first group: set what is not set; :class:`PolicyError` where something contradicts it."""
    for name in _HANDLING:
        found = environ.get(name, _OFF)
        if found != _OFF:
            raise PolicyError(
                f"{name}={found}: NCCL's watchdog would end this process, or abort its groups, before the survivors of "
                f"a fault know what they hold. Unset it, or set {name}=0; without recovery in the process use torchrun"
            )
    for name, value in _SET.items():
        environ.setdefault(name, value)
