"""``docs/troubleshooting.md`` quotes messages of the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
GAP = re.compile(r"…|%(?:\.\d+)?[sdfgr]")
WORD = re.compile(r"(?<![^ (])[A-Za-z]+(?![^ .,:;)])")
"""A whole word, which the code of a message has in one piece."""


def quoted_messages():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").partition("## By message")[2]
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def text_of(node):
    """Return a string of the code with `…` for each placeholder."""
    if isinstance(node, ast.Constant):
        return GAP.sub("…", node.value)
    return "".join(text_of(one) if isinstance(one, ast.Constant) else "…" for one in node.values)


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def messages_of(module):
    return [text_of(node).replace("`", "") for node in ast.walk(ast.parse(module)) if is_text(node)]


@pytest.fixture(scope="module")
def code_messages():
    """Return a function that returns the texts of all modules that have all words of a message."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    modules = [path.read_text(encoding="utf-8") for path in paths]
    parsed = functools.cache(messages_of)

    def texts(message):
        words = WORD.findall(message)
        return [text for module in modules if all(word in module for word in words) for text in parsed(module)]

    return texts


def test_quoted_messages_are_in_the_code(code_messages):
    messages = quoted_messages()
    assert len(messages) > 20
    for message in messages:
        parts = message.split("…")
        likely = [one for one in code_messages(message) if max(parts, key=len) in one]
        pattern = ".*?".join(map(re.escape, parts))
        assert any(re.search(pattern, one, re.DOTALL) for one in likely), message


def test_messages_are_quoted_once():
    messages = quoted_messages()
    assert len(messages) == len(set(messages))
