"""Checks the documentation and renders it: links lead somewhere, code is code, commands exist.

    python docs/build.py [--out site] [--write]

Every relative link and anchor of every page is followed; every Python block must compile, and one that names an example
must be that file; every `make` target, every command of `tieredckpt`, `elastic` and `peerstore`, and every test a page
names must exist. Every walk of `docs/architecture.md` has at most eight files, and names only existing code.
`docs/reference/settings.md` is generated from the settings in the code (`--write`), and must be current.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import html
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
MAX_WALK_FILES = 8
SETTINGS_PAGE = ROOT / "docs/reference/settings.md"
SETTINGS_MODULE = ROOT / "tieredckpt/settings.py"
ENVIRONMENT_VARIABLE = re.compile(r"(?:TIEREDCKPT|ELASTIC|PEERSTORE)_[A-Z_]+")
UNITS = {
    "_s": "seconds",
    "every": "steps",
    "keep_last": "steps",
    "slots_per_rank": "slots",
    "burst_slots": "slots",
    "copies": "copies",
    "parity_group_size": "nodes",
    "streams": "connections",
    "crashed_loads": "loads",
    "copy_threads": "threads",
    "concurrency": "parts",
    "budget": "bytes or percent",
    "part_size": "bytes",
    "bandwidth": "bytes per second",
}
"""The unit of a setting, by the end of its name."""
SETTINGS_START = """# Settings

This page is generated from the code: `make docs ARGS=--write`.

A setting is a key of a YAML file, or an environment variable. The order, from the strongest source to the weakest:

1. An argument in the script, such as `Checkpointer(durable=...)`.
2. The variable of the setting, `$TIEREDCKPT_SECTION_KEY`.
3. The file that `$TIEREDCKPT_CONFIG` names ([an example](../../examples/cluster.yaml)).
4. The platform's settings that `$TIEREDCKPT_CLUSTER` names ([HyperPod](hyperpod-cluster.md)).
5. The default.

Unknown keys, values out of range and contradictions are errors, and all of them are reported together. Write a size as
`64GiB` or as a number of bytes. A variable accepts `1` and `0` for `true` and `false`.

In the file, each section holds its keys:

```yaml
durable:
  url: s3://my-bucket/checkpoints
  every: 200
```
"""
SETTINGS_TABLE = "| key and variable | type or choices | default | meaning |\n|---|---|---|---|"
STYLE = """
body { font: 16px/1.55 system-ui, sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
pre, code { font: 14px/1.45 ui-monospace, monospace; background: #f3f5f7 } pre { padding: .8rem; overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border: 1px solid #d5dbe1; padding: .3rem .6rem; text-align: left }
img { max-width: 100% } nav { border-bottom: 1px solid #d5dbe1; padding-bottom: .6rem } nav a { margin-right: 1rem }
"""


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
    """What stands in code is what exists: commands, make targets, tests."""
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


def settings_page() -> str:
    """Return the text of the settings page."""
    from tieredckpt.settings import Settings

    docs = attribute_docstrings(SETTINGS_MODULE)
    defaults, kinds = Settings(), get_type_hints(Settings)
    enabled = setting_row("enabled", kinds["enabled"], defaults.enabled, sentence(docs, "Settings.enabled"))
    blocks = [SETTINGS_START, "## enabled\n", SETTINGS_TABLE, enabled]
    for section, kind in kinds.items():
        if not dataclasses.is_dataclass(kind):
            continue
        blocks += [f"\n## {section}\n", f"{docs[kind.__name__]}\n", SETTINGS_TABLE]
        values = getattr(defaults, section)
        for key, its_kind in get_type_hints(kind).items():
            text = sentence(docs, f"{kind.__name__}.{key}")
            blocks.append(setting_row(f"{section}.{key}", its_kind, getattr(values, key), text))
    blocks += ["\n## Other environment variables\n", "| variable | meaning |\n|---|---|"]
    blocks += [f"| `${name}` | {text} |" for name, text in sorted(environment_variables().items())]
    return "\n".join(blocks) + "\n"


def setting_row(key: str, kind: Any, default: Any, text: str) -> str:
    variable = "TIEREDCKPT_" + key.replace(".", "_").upper()
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, float):
        default = f"{default:.15g}"
    shown = "empty" if default in ("", {}) else f"`{default}`"
    return f"| `{key}`<br>`${variable}` | {kind_text(key, kind)} | {shown} | {text} |"


def kind_text(key: str, kind: Any) -> str:
    """Return the type of a setting, or its choices, with its range and its unit."""
    from tieredckpt.settings import RANGES, UNLIMITED

    named = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}
    if choices := get_args(kind):
        text = "`key: value` pairs" if isinstance(choices[0], type) else ", ".join(f"`{one}`" for one in choices)
    else:
        text = named[kind]
    if key in RANGES:
        least, most = RANGES[key]
        text += f", {least} or more" if most == UNLIMITED else f", {least} to {most}"
    unit = next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return f"{text}; {unit}" if unit and kind in (int, float, str) else text


@functools.cache
def environment_variables() -> dict[str, str]:
    """Return the variables that constants of the packages name, and the docstrings of the constants."""
    found: dict[str, str] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for one in ast.parse(text).body if ENVIRONMENT_VARIABLE.search(text) else ():
            if (
                isinstance(one, ast.Assign)
                and isinstance(one.targets[0], ast.Name)
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, str)
                and ENVIRONMENT_VARIABLE.fullmatch(one.value.value)
            ):
                found[one.value.value] = sentence(attribute_docstrings(path), one.targets[0].id)
    return found


def attribute_docstrings(path: Path) -> dict[str, str]:
    """Return the docstrings of a module's classes, of their attributes and of its constants, as Markdown."""
    found: dict[str, str] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for one, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(one, ast.ClassDef):
                found[one.name] = as_markdown(ast.get_docstring(one) or "")
                add(one.body, f"{one.name}.")
            targets = getattr(one, "targets", [getattr(one, "target", None)])
            for target in targets:
                if isinstance(target, ast.Name) and after is not None and (text := text_of(after)):
                    found[prefix + target.id] = as_markdown(text)

    add(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def text_of(statement: ast.stmt) -> str:
    """Return the text of a statement that is only a string."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def sentence(docs: Mapping[str, str], name: str) -> str:
    if not docs.get(name):
        raise LookupError(f"{name} has no docstring: docs/{SETTINGS_PAGE.name} needs one")
    return docs[name]


def as_markdown(text: str) -> str:
    """Return a docstring as one line of Markdown that fits in a table."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def check_settings_page(page: Page) -> None:
    if page.path.read_text(encoding="utf-8") != settings_page():
        page.wrong("it does not show the current settings; run `make docs ARGS=--write` to generate it again")


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


def render(page: Page, parser: MarkdownIt, out: Path) -> None:
    place = out / page.path.relative_to(ROOT).with_suffix(".html")
    if page.path.name == "README.md":
        place = place.with_name("index.html")
    place.parent.mkdir(parents=True, exist_ok=True)
    body = parser.renderer.render(page.tokens, parser.options, {})
    body = re.sub(
        r'href="([^":]*?)(README)?\.md(#[^"]*)?"',
        lambda m: f'href="{m[1]}{"index" if m[2] else ""}.html{m[3] or ""}"',
        body,
    )
    up = "../" * (len(page.path.relative_to(ROOT).parts) - 1)
    links = "".join(
        f'<a href="{up}{where}">{name}</a>'
        for name, where in (
            ("Home", "index.html"),
            ("Architecture", "docs/architecture.html"),
            ("Settings", "docs/settings.html"),
            ("Benchmarks", "docs/benchmarks.html"),
        )
    )
    title = html.escape(next((t.content for t in page.tokens if t.type == "inline"), page.path.stem))
    place.write_text(
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><nav>{links}</nav>{body}",
        encoding="utf-8",
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=ROOT / "site", help="where the rendered pages go")
    arguments.add_argument("--write", action="store_true", help="generate docs/reference/settings.md again")
    options = arguments.parse_args()
    out: Path = options.out
    if options.write:
        SETTINGS_PAGE.write_text(settings_page(), encoding="utf-8")
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    found = [parse(path, parser) for path in pages()]
    anchors = {page.path: page.anchors for page in found}
    known = commands()
    for page in found:
        check_links(page, anchors)
        check_code(page)
        check_names(page, known)
        if page.path == ROOT / "docs/architecture.md":
            check_walks(page)
        if page.path == SETTINGS_PAGE:
            check_settings_page(page)
        render(page, parser, out)
    shutil.copytree(ROOT / "docs" / "figures", out / "docs" / "figures", dirs_exist_ok=True)
    problems = [problem for page in found for problem in page.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    verdict = f"{len(problems)} problems" if problems else "all links, code and commands are good"
    print(f"{len(found)} pages rendered into {out}: {verdict}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
