"""Check the documentation: links, code blocks, names of commands and tests, and the generated pages.

    python docs/build.py [--write]

Every relative link and anchor must lead to a file and a heading. Every Python block must compile, and a block after
`<!-- examples/NAME -->` must equal that file. Every `make` target, every command and every test that a page names must
exist. `docs/architecture.md` lists every folder of the packages. Each walk of `docs/reference/code-walks.md`
has at most eight files and names existing code. Some reference pages are
generated from the code (`--write`), and must be current.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from markdown_it import MarkdownIt
from markdown_it.token import Token
from reference_pages import generated_pages

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
MAX_WALK_FILES = 8


@dataclass
class Page:
    path: Path
    tokens: list[Token]
    anchors: set[str]
    problems: list[str] = field(default_factory=list)

    def wrong(self, what: str) -> None:
        self.problems.append(f"{self.path.relative_to(ROOT)}: {what}")


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def parse(path: Path, parser: MarkdownIt) -> Page:
    tokens = parser.parse(path.read_text(encoding="utf-8"))
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return Page(path, tokens, {slug(heading) for heading in headings})


def slug(heading: str) -> str:
    """As the usual hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def inline(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from inline(token.children or [])


def check_links(page: Page, anchors: dict[Path, set[str]]) -> None:
    for token in inline(page.tokens):
        target = token.attrGet("href") or token.attrGet("src")
        if not isinstance(target, str) or re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            page.wrong(f"link to {target}: there is no such file")
        elif anchor and anchor not in anchors.get(path, set()):
            page.wrong(f"link to {target}: there is no such heading")


def check_code(page: Page) -> None:
    example = ""
    for token in page.tokens:
        if token.type == "html_block" and (named := re.match(r"<!-- (examples/\S+) -->", token.content)):
            example = named[1]
        if token.type != "fence":
            continue
        if token.info == "python":
            try:
                compile(token.content, str(page.path), "exec")
            except SyntaxError as error:
                page.wrong(f"code that does not compile: {error}")
        if example and token.content.strip() != (ROOT / example).read_text().strip():
            page.wrong(f"the code shown is not {example}")
        example = ""


def check_names(page: Page, commands: dict[str, set[str]]) -> None:
    """Check that the commands, make targets and tests of a page exist."""
    for token in inline(page.tokens):
        if token.type != "code_inline" and (token.type, token.info) not in (("fence", "bash"), ("fence", "sh")):
            continue
        for program, known in commands.items():
            for found in re.finditer(rf"(?:^|[`\s]){program} ([a-z][a-z-]+)", token.content):
                if found[1] not in known:
                    page.wrong(f"`{program} {found[1]}`: there is no such command")
        for test in re.findall(r"tests/[\w/]+(?:\.py)?", token.content):
            if not (ROOT / test).exists():
                page.wrong(f"`{test}`: there is no such test")
        if token.type == "code_inline" and re.fullmatch(r"test_\w+", token.content) and token.content not in tests():
            page.wrong(f"`{token.content}`: there is no such test")


def check_folders(page: Page) -> None:
    """The page lists every folder of the packages, and no other."""
    listed: set[str] = set()
    for block in re.findall(r"^```\n(\w+/ .*?)^```", page.path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for package, folders in re.findall(r"^(\w+)/ .*\n((?:  .*\n)*)", block, re.MULTILINE):
            listed |= {f"{package}/{name}" for name in re.findall(r"^  (\S+)", folders, re.MULTILINE)}
    modules = (path.relative_to(ROOT).parent for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = {str(folder) for folder in modules if str(folder) not in PACKAGES}
    for folder in sorted(found - listed):
        page.wrong(f"the folder {folder} is not listed")
    for folder in sorted(listed - found):
        page.wrong(f"the folder {folder} does not exist")


def check_walks(page: Page) -> None:
    """Every file and every identifier in a table of the walks exists; each row names code of its file."""
    text = page.path.read_text(encoding="utf-8")
    for walk in re.split(r"^###? ", text, flags=re.MULTILINE):
        rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| (.*) \|$", walk, re.MULTILINE)
        title = walk.partition("\n")[0]
        if len(rows) > MAX_WALK_FILES:
            page.wrong(f"walk {title!r} has {len(rows)} files, and the limit is {MAX_WALK_FILES}")
        for number, path, hand_over in rows:
            row = f"walk {title!r}, row {number}"
            if not (ROOT / path).is_file():
                page.wrong(f"{row}: the file {path} does not exist")
                continue
            named = re.findall(r"`(?!dcp\.|\w+\.py`)(\w+(?:\.\w+)?)`", hand_over)
            for name in named:
                if name not in defined_names():
                    page.wrong(f"{row}: no package defines `{name}`")
            if not names_in(ROOT / path).intersection(named):
                page.wrong(f"{row}: the text names no class or function of {path}")
            for module in re.findall(r"`([\w/]+\.py)`", hand_over):
                if not any(list((ROOT / package).rglob(module)) for package in PACKAGES):
                    page.wrong(f"{row}: the module {module} does not exist")


def names_in(path: Path) -> set[str]:
    """Return the classes, functions and ``Class.method`` names that a module defines."""
    found: set[str] = set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for one in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(one, (ast.ClassDef, *functions)):
            found.add(one.name)
        if isinstance(one, ast.ClassDef):
            found |= {f"{one.name}.{method.name}" for method in one.body if isinstance(method, functions)}
    return found


@functools.cache
def defined_names() -> frozenset[str]:
    """Return the names that the packages' modules define."""
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return frozenset(name for path in modules for name in names_in(path))


def check_generated(page: Page, text: str) -> None:
    if page.path.read_text(encoding="utf-8") != text:
        page.wrong("it is not what the code says now; run `make docs ARGS=--write` to generate it again")


@functools.cache
def tests() -> frozenset[str]:
    """Names of test functions and test files."""
    known: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        known |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    return frozenset(known)


def commands() -> dict[str, set[str]]:
    from elastic.cli import elastic_commands as elastic
    from tieredckpt.cli import tieredckpt_cli as tieredckpt

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {
        "make": set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)),
        "elastic": set(elastic.list_commands(click.Context(elastic))),
        "tieredckpt": set(tieredckpt.list_commands(click.Context(tieredckpt))),
        "peerstore": {"serve", "status"},
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", action="store_true", help="generate the reference pages again")
    options = arguments.parse_args()
    generated = generated_pages()
    if options.write:
        for path, text in generated.items():
            path.write_text(text, encoding="utf-8")
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    found = [parse(path, parser) for path in pages()]
    anchors = {page.path: page.anchors for page in found}
    known = commands()
    for page in found:
        check_links(page, anchors)
        check_code(page)
        check_names(page, known)
        if page.path == ROOT / "docs/architecture.md":
            check_folders(page)
        if page.path == ROOT / "docs/reference/code-walks.md":
            check_walks(page)
        if page.path in generated:
            check_generated(page, generated[page.path])
    problems = [problem for page in found for problem in page.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    verdict = f"{len(problems)} problems" if problems else "all links, code and commands are good"
    print(f"{len(found)} pages: {verdict}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
