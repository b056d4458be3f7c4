"""Jobs of a benchmark: processes, event files, and cleanup even if the benchmark dies first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import warden
from benchmarks.diary import Line, read_diaries

PATIENCE_S = 120.0
LOOK_S, LOOK_CLOSELY_S = 0.1, 0.01
_ROOT = Path(__file__).parent.parent
_WARDEN = Path(warden.__file__)
_STRANGE = ("ELASTIC_", "TIEREDCKPT_", "TORCHELASTIC_")


class Job:
    """The processes of a job and their events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_STRANGE)},
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": "1",
            # Without it, an agent that joins torchrun later waits for an address that the first agent sent earlier.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def lines(self) -> list[Line]:
        return read_diaries(self._folder / "diary")

    def close(self) -> None:
        for one in self._started:
            self._end(one)

    @staticmethod
    def _end(one: subprocess.Popen[bytes]) -> None:
        """Kill the command and its descendants: the warden does so when its standard input closes."""
        one.stdin.close()
        one.wait()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"output-{len(self._started)}").open("wb") as output:
            one = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WARDEN), sys.executable, *words],
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(one)
        return one

    def _until(self, ready: Callable[[], bool], what: str, every_s: float = LOOK_S) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > deadline:
                logs = (*self._folder.glob("output-*"), *self._folder.glob("logs/*/*.log"))
                said = "\n".join(path.read_text(errors="replace")[-3000:] for path in logs)
                raise RuntimeError(f"Timed out after {PATIENCE_S:.0f} s waiting until {what}.\n{said}")
            time.sleep(every_s)

    def _pids(self) -> set[int]:
        return {line["pid"] for line in self.lines()}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
