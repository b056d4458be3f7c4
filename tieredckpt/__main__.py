"""``python -m tieredckpt``."""

from __future__ import annotations

import sys

from tieredckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
