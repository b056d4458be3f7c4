"""One section as a process: ``python -m tests.gpu.section MODULE OUT LIMIT``."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.gpu.findings import record, record_all
from tests.gpu.report import Check, Fact, Figure


def main(module: str, out: Path, limit_s: float) -> int:
    """Run the section ``module``: its ``run`` yields findings, or records them in ``out`` itself."""
    # Not standard error itself: pytest puts a file of its own in its place, and drops it when it is killed.
    faulthandler.register(signal.SIGUSR1, os.fdopen(os.dup(2), "w"), all_threads=True)
    from tests.gpu.devices import device_kind, device_names

    record(out, Fact("devices", ",".join(device_names())))
    found = importlib.import_module(module).run(device_kind(), out, limit_s)
    if isinstance(found, Iterable) and not isinstance(found, (str, bytes, dict)):
        record_all(out, (one for one in found if isinstance(one, (Fact, Check, Figure))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
