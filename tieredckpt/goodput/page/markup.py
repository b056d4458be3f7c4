"""HTML and SVG from values. What is not markup by type is escaped: nothing a ledger says is taken for markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

# Control characters, and halves of a character: no page may hold them.
_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Part: TypeAlias = "str | int | float | Iterable[Part] | None"


def text(part: Part) -> Markup:
    """Anything as markup: strings are escaped, ``None`` is nothing, of others each item."""
    if isinstance(part, Markup):
        return part
    if part is None:
        return Markup()
    if isinstance(part, str | int | float):
        return Markup(html.escape(_UNFIT.sub("\ufffd", str(part))))
    return Markup("".join(text(one) for one in part))


def tag(name: str, /, *parts: Part, **attributes: str | float | None) -> Markup:
    """``tag("p", "a < b", class_="x")`` is ``<p class="x">a &lt; b</p>``; attributes that are ``None`` are left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{text(parts)}</{name}>")


def number(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    shown = f"{value:.1f}"
    return shown.removesuffix(".0")


def _attribute(value: str | float) -> str:
    return text(number(value) if isinstance(value, float) else value)


def section(name: str, title: str, *parts: Part, note: Part = None) -> Markup:
    """One part of the page, by which it can be linked to."""
    said = tag("p", note, class_="note") if note else None
    return tag("section", tag("h2", title), said, parts, id=name)


def data(shown: str, value: float | str) -> Markup:
    """What people read, with the number it was made from."""
    return tag("data", shown, value=repr(value) if isinstance(value, float) else str(value))


def rows(head: Iterable[str], body: Iterable[Iterable[Part]], *, right: Iterable[str] = ()) -> Markup:
    """A table; the columns named in ``right`` are of numbers."""
    names, numbers = list(head), set(right)
    sides = ["n" if name in numbers else None for name in names]
    top = tag("tr", [tag("th", name, class_=side, scope="col") for name, side in zip(names, sides, strict=True)])
    lines = [tag("tr", [tag("td", cell, class_=side) for cell, side in zip(line, sides, strict=True)]) for line in body]
    return tag("div", tag("table", tag("thead", top), tag("tbody", lines)), class_="wide")
