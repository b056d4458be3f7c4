"""Hooks of mkdocs.yml: navigation by folder, links that leave docs/, and lists of CommonMark.

The pages are written for CommonMark, and their links lead to files of the repository. MkDocs reads another dialect and
knows only docs/. The hooks translate the dialect, and add a page for each linked file outside docs/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
FENCE = re.compile(r" *(```+|~~~+)")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) +")
CODE = re.compile(r"`[^`]+`")
ROLE = re.compile(r":\w+:<code>~?(?:[\w.]+\.)?(\w+)</code>")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".toml": "toml", ".json": "json"}


def site_path(path: Path) -> str | None:
    """Return the page that shows a file of the repository, or None for all other paths."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    if path == ROOT / "README.md":
        return "index.md"
    if path.parent == ROOT and path.suffix == ".md":
        return f"project/{path.name}"
    return f"source/{path.relative_to(ROOT)}.md" if path.is_file() and path.is_relative_to(ROOT) else None


def linked_files(text: str, source: Path) -> Iterator[Path]:
    """Yield the files that the relative links of a page lead to."""
    for line in prose(text):
        for found in LINK.finditer(line):
            yield (source.parent / found[1]).resolve()


def relink(text: str, source: Path, page: str) -> str:
    """Return the text with links from `page` of the site instead of links from the file `source`."""

    def target(found: re.Match[str]) -> str:
        path = (source.parent / found[1]).resolve()
        shown = site_path(path)
        if shown is None:
            return found[0]
        inside = path.is_relative_to(DOCS) or shown.startswith("project/")
        return os.path.relpath(shown, Path(page).parent) + (found[2] or "" if inside else "")

    def change(line: str) -> str:
        without = re.sub(r"\[([^]\[]+)\]\(([^)\s#]+)\)", lambda one: one[1] if is_folder(one[2]) else one[0], line)
        return LINK.sub(target, without)

    def is_folder(link: str) -> bool:
        path = (source.parent / link).resolve()
        return path.is_dir() and path.is_relative_to(ROOT)

    return by_line(text, change)


def prose(text: str) -> list[str]:
    """Return the lines outside fenced code."""
    lines: list[str] = []
    by_line(text, lambda line: lines.append(line) or line)
    return lines


def by_line(text: str, change: Callable[[str], str]) -> str:
    """Return the text with a change to each line outside fenced code."""
    fence, changed = "", []
    for line in text.split("\n"):
        found = FENCE.match(line)
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
            changed.append(line)
        else:
            changed.append(line if fence else change(line))
    return "\n".join(changed)


def as_python_markdown(text: str) -> str:
    """Return a page with lists and tables as Python-Markdown needs them."""
    lines: list[str] = []
    fence, indent = "", 0
    for line in text.split("\n"):
        found = FENCE.match(line)
        if not fence and not line.startswith(" ") and (item := LIST_ITEM.match(line)):
            if not indent and lines and lines[-1].strip():
                lines.append("")
            indent = len(item[0])
        elif indent and line.strip() and not line.startswith(" " * indent) and not fence:
            indent = 0
        shown = CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") and not fence else line
        lines.append(" " * (4 - indent) + shown if 0 < indent < 4 and line.startswith(" ") else shown)
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
    return "\n".join(lines)


def expand(nav: Iterable[Any], named: set[str]) -> list[Any]:
    """Return the navigation with the remaining pages of a folder instead of `folder/*`."""
    expanded: list[Any] = []
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(value, list):
            pages = expand(value, named)
        elif value.endswith("/*"):
            found = (str(path.relative_to(DOCS)) for path in sorted((DOCS / value[:-2]).glob("*.md")))
            pages = [page for page in found if page not in named]
        else:
            expanded.append(entry)
            continue
        expanded += [{title: pages}] if title and pages else pages
    return expanded


def pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for one in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages_in(one)


def on_config(config: Any) -> Any:
    config.nav = expand(config.nav, set(pages_in(config.nav)))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, and a page for each file that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    roots = [path for path in sorted(ROOT.glob("*.md")) if path.name != "README.md"]
    linked = {one for path in [*roots, *DOCS.rglob("*.md")] for one in linked_files(path.read_text("utf-8"), path)}
    for path in [*roots, *sorted(linked)]:
        page = site_path(path)
        if page is None or path.is_relative_to(DOCS) or files.get_file_from_path(page):
            continue
        text = path.read_text("utf-8")
        if page.startswith("source/"):
            text = f"# {path.name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    source = ROOT / name.removeprefix("project/") if name.startswith("project/") else DOCS / name
    return text if name.startswith("source/") else as_python_markdown(relink(text, source, name))


def on_page_content(html: str, **_: Any) -> str:
    """Show `:class:` and other roles of docstrings as code, without the `::` before examples."""
    return ROLE.sub(r"<code>\1</code>", html).replace("<p>::</p>", "")
