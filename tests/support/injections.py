"""The faults that a job's processes have injected so far."""

import contextlib

import msgspec

from elastic.fault_injection.fault_actions import InjectedFault, InjectionRecord


def injected_faults(record: InjectionRecord) -> list[InjectedFault]:
    """Return the injected faults in order, without one whose file is incomplete."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in record.folder.iterdir():
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.Decoder(InjectedFault).decode(path.read_bytes()))
    return sorted(found, key=lambda one: one.injected_at)
