"""``python -m elastic.reshard``."""

from __future__ import annotations

import sys

import click

from elastic.reshard.command import reshard
from peerstore.errors import PeerStoreError
from tieredckpt.cli.exits import Exit
from tieredckpt.cli.screen import Screen
from tieredckpt.errors import TieredCheckpointError


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    screen = Screen("elastic reshard")
    try:
        return int(reshard.main(argv, prog_name="elastic reshard", standalone_mode=False, obj=screen) or 0)
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.ClickException as wrong:
        wrong.show()
        return int(wrong.exit_code)
    except (click.Abort, KeyboardInterrupt):
        screen.err.print("interrupted")
        return Exit.INTERRUPTED
    except (TieredCheckpointError, PeerStoreError, OSError) as error:
        return screen.failed(error)


if __name__ == "__main__":
    sys.exit(main())
