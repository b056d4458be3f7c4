"""The closest known name for a misspelled one, and a command-line parser that suggests it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'name'?" with the closest known name; "" if none is close."""
    close = difflib.get_close_matches(wrong, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


class SuggestingParser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line, with the closest option or command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse ``args`` as ``argparse`` does, but reject an unknown option before a missing one."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:
            self._reject_unknown_options(words)
        return super().parse_known_args(words, namespace)

    def _reject_unknown_options(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in words:
            if word == "--":
                return
            option = word.partition("=")[0]
            if option.startswith("--") and not any(one.startswith(option) for one in known):
                self.error(f"No such option {option!r}.{did_you_mean(option, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"No such command {value!r}.{did_you_mean(str(value), action.choices)}")
        raise argparse.ArgumentError(action, f"no such value {value!r} (known are {', '.join(action.choices)})")

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} `{self.prog} --help` lists the options\n")
