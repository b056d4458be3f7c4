"""Script for one upload in a process that a test kills; takes JSON on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.journals import FileJournal
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.settings import DurableSettings


def main() -> None:
    task = json.load(sys.stdin)
    store = open_store(task["url"], DurableSettings(**task["settings"]))
    store.upload(
        task["name"],
        Path(task["source"]),
        task["size_bytes"],
        journal=FileJournal(Path(task["journal"])),
        identity=task["identity"],
    )
    store.close()


if __name__ == "__main__":
    main()
