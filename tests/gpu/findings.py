"""Findings of one section, appended to a file as they come: a section that is killed loses none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.gpu.report import Finding

FILE = "findings.jsonl"


def record(out: Path, *found: Finding) -> None:
    """Append to the findings in the folder ``out``, and print them to the section's log."""
    with (out / FILE).open("ab") as to:
        for one in found:
            to.write(msgspec.json.encode(one) + b"\n")
            print(one)


def record_all(out: Path, found: Iterable[Finding]) -> None:
    """Record each of ``found`` when it comes."""
    for one in found:
        record(out, one)


def read(out: Path) -> list[Finding]:
    """Return the findings in the folder ``out``; a line that was cut short is skipped."""
    found: list[Finding] = []
    with contextlib.suppress(FileNotFoundError):
        for line in (out / FILE).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=Finding))
    return found
