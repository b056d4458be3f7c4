"""What a piece of time is shown as: its name, its words, its colour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tieredckpt.goodput.model import Category, Interval
from tieredckpt.goodput.page.markup import Markup, Part, tag
from tieredckpt.ledger.events import STAGES


@dataclass(frozen=True)
class Kind:
    name: str
    words: str
    light: str
    dark: str


CATEGORIES = (
    Kind("productive", "steps that count", "#2e9e68", "#2f9a68"),
    Kind("save", "saving", "#58b2e6", "#4aa3d8"),
    Kind("lost", "work undone", "#e5a50a", "#d99e13"),
    Kind("startup", "start", "#9aa7b5", "#7b8896"),
    Kind("resize", "resize", "#9a6fd8", "#9d78d6"),
    Kind("recovery", "recovery", "#d33f49", "#dd5560"),
    Kind("ending", "end", "#b7c1cc", "#5d6975"),
    Kind("down", "not running", "#6b7785", "#46515c"),
    Kind("unknown", "not known", "#dde2e8", "#333d47"),
    Kind("missing", "missing ranks", "#eef1f4", "#232b33"),
)
_STAGES = (
    Kind("detect", "detect", "#c62f45", "#dc4a5e"),
    Kind("seal", "seal", "#b863a8", "#c070b2"),
    Kind("abort", "abort", "#ea6a3c", "#ea7448"),
    Kind("leave", "leave", "#b98552", "#b98a5c"),
    Kind("launch", "launch", "#f0934e", "#ef9a5b"),
    Kind("rendezvous", "rendezvous", "#f4b860", "#eeb45f"),
    Kind("groups", "groups", "#e48bb0", "#db83a8"),
    Kind("hydrate", "hydrate", "#3f6fd0", "#5b87e0"),
    Kind("loader", "loader", "#2fa6b5", "#34a3b1"),
    Kind("first_step", "first step", "#8fbf4f", "#86b549"),
    Kind("other", "not said", "#c3b3a6", "#8d8078"),
)
KINDS = {one.name: one for one in (*CATEGORIES, *_STAGES)}
_ORDER = ("productive", "save", "lost", "startup", "resize", *(one.name for one in _STAGES), "recovery")
ORDER = (*_ORDER, "ending", "down", "unknown", "missing")
"""From the bottom of a stack to its top."""
STAGE_NAMES = frozenset(STAGES)


def stage_kind(name: str) -> str:
    return name if name in STAGE_NAMES else "lost" if name in ("lost", "interrupted") else "other"


def kind_of(interval: Interval) -> str:
    """Stages of recoveries have colours of their own; other ways into a world have one each."""
    return stage_kind(interval.stage) if interval.category is Category.RECOVERY else interval.category.value


def legend(names: Iterable[str], more: Part = None) -> Markup:
    there = set(names)
    keys = [tag("span", tag("i", class_=f"k f-{name}"), KINDS[name].words) for name in ORDER if name in there]
    return tag("p", keys, more, class_="legend")


def colours(dark: bool) -> str:
    """Custom properties, for a style sheet."""
    return "".join(f"--{one.name}:{one.dark if dark else one.light};" for one in KINDS.values())


def classes() -> str:
    return "".join(f".f-{name}{{fill:var(--{name});background:var(--{name})}}" for name in KINDS)
