"""Wrapper that makes the kernel kill a child when its parent dies. Standard library only.

The kernel kills the process when the thread that started it ends. The setting survives ``exec``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the prctl call
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command of the parent
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
