"""``python -m elastic.control TASK``: what ``elastic run`` starts beside the ranks."""

from __future__ import annotations

import sys

from elastic.control.tasks import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
