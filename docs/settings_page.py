"""The page of all settings, from the code of the settings."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
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
4. The platform's settings that `$TIEREDCKPT_CLUSTER` names ([HyperPod](hyperpod.md#readers-of-the-configuration)).
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
        raise LookupError(f"{name} has no docstring: docs/reference/settings.md needs one")
    return docs[name]


def as_markdown(text: str) -> str:
    """Return a docstring as one line of Markdown that fits in a table."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")
