"""What a command of ``elastic`` shows: as ``tieredckpt``'s commands do, under its own name and with its own exits."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence

from rich.markup import escape

from elastic.cli.exits import Exit, advice_for, exit_for
from tieredckpt.cli.screen import Screen


class ElasticScreen(Screen):
    words: Sequence[str] = ()
    """Of the command line."""

    def ended_by(self, error: BaseException) -> Exit:
        """Report what ended the command; its exit code."""
        code, advice = exit_for(error), advice_for(error)
        if self.debug:
            traceback.print_exception(error)
        text = str(error) or type(error).__name__
        self.err.print(f"[bold red]elastic:[/] {escape(text)}")
        if advice:
            self.err.print(f"         {escape(advice)}")
        if self.as_json:
            said = {"kind": type(error).__name__, "message": text, "advice": advice, "exit": int(code)}
            sys.stdout.write(json.dumps({"error": said}, indent=2) + "\n")
        return code
