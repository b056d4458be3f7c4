"""Pages and parts of pages generated from the code, such as settings, commands and errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import msgspec
from reference_texts import ERRORS, METRICS
from settings_page import as_markdown, settings_page

from peerstore.rpc import Method

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/reference"
GENERATED = "This page is generated from the code: `make docs ARGS=--write`."
BEGIN, END = "<!-- make docs ARGS=--write: begin -->", "<!-- make docs ARGS=--write: end -->"
METRIC_MODULES = ("tieredckpt/agent/agent_http.py", "integration/sagemaker/memory_service/http_frontend.py")
GOODPUT_MODULE = "tieredckpt/cli/goodput.py"


def generated_pages() -> dict[Path, str]:
    """Return the text of each generated page."""
    return {
        REFERENCE / "settings.md": settings_page(),
        REFERENCE / "cli.md": with_part(REFERENCE / "cli.md", commands_part()),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "metrics.md": with_part(REFERENCE / "metrics.md", metrics_part()),
        REFERENCE / "format.md": with_part(REFERENCE / "format.md", agent_operations_part()),
    }


def with_part(page: Path, part: str) -> str:
    """Return a page written by hand with the generated part between its markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise LookupError(f"{page} has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


# -- commands -------------------------------------------------------------------------------------------------------


def programs() -> dict[str, click.Command]:
    from elastic.cli import elastic_commands
    from integration.hyperpod.operator.sim_cli import operator_sim_cli
    from tieredckpt.cli import tieredckpt_cli

    return {"tieredckpt": tieredckpt_cli, "elastic": elastic_commands, "hyperpod-operator-sim": operator_sim_cli}


def commands_part() -> str:
    """Return the sections of all commands with their options."""
    blocks: list[str] = []
    for name, program in programs().items():
        blocks.append(f"## Options of {name}")
        blocks += command_blocks(program, name)
    return "\n\n".join(blocks)


def command_blocks(command: click.Command, name: str) -> Iterator[str]:
    """Yield the Markdown of a command and its subcommands."""
    if not isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        yield f"### {name}\n\n{summary(command)}\n\n`{usage}`"
        yield from option_table(option_rows(command.params, context))
        return
    context = click.Context(command, info_name=name)
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        if found is None:
            continue
        if found.hidden and f"{name} {child}" == "tieredckpt agent run":
            yield f"### {name}\n\n{summary(found)}\n\n`{name} [OPTIONS]`"
            yield from option_table(agent_rows())
        elif not found.hidden:
            yield from command_blocks(found, f"{name} {child}")


def summary(command: click.Command) -> str:
    """Return the first paragraph of a command's help."""
    return as_markdown((command.help or command.short_help or "").split("\n\n")[0])


def option_table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    lines = [f"| {name} | {text} |" for name, text in rows]
    if lines:
        yield "\n".join(["| option | meaning |", "|---|---|", *lines])


def option_rows(parameters: Iterable[click.Parameter], context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in parameters:
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            yield f"`{record[0]}`".replace("|", "\\|"), as_markdown(record[1])


def agent_rows() -> Iterator[tuple[str, str]]:
    """Yield the options of `tieredckpt agent`, which argparse reads."""
    from tieredckpt.agent.__main__ import agent_parser

    for action in agent_parser()._actions:
        if "--help" not in action.option_strings:
            text = (action.help or "") % {"default": action.default}
            yield f"`{', '.join(action.option_strings)}`", as_markdown(f"{text[:1].upper()}{text[1:]}.")


# -- exit codes -----------------------------------------------------------------------------------------------------


def exit_code_blocks() -> Iterator[str]:
    """Yield the exit codes of each program, with the errors that end a command with them."""
    from elastic.cli.common import ELASTIC_EXIT_HELP, ElasticScreen
    from integration.hyperpod.operator.sim_cli import operator_sim_cli
    from tieredckpt.cli.exit_codes import EXIT_CODES_HELP, exit_code_for

    yield (
        "## Exit codes\n\nAn error that no row names ends a command with 1. "
        "`whatif`, `status` and `verify` use these codes for their findings too ([the command line](cli.md))."
    )
    for title, text, code_of in (
        ("tieredckpt", EXIT_CODES_HELP, exit_code_for),
        ("elastic", ELASTIC_EXIT_HELP, partial(exit_code_for, codes=ElasticScreen.codes_by_error)),
        ("hyperpod-operator-sim", operator_sim_cli.epilog or "", None),
    ):
        rows = ["| code | meaning | errors |", "|---|---|---|"]
        for code, meaning in exit_lines(text):
            named = [one for one in errors() if code > 1 and code_of is not None and code_of(bare(one)) == code]
            rows.append(f"| {code} | {as_markdown(meaning)} | {', '.join(f'`{one.__name__}`' for one in named)} |")
        yield f"### Exit codes of {title}\n\n" + "\n".join(rows)


def exit_lines(text: str) -> Iterator[tuple[int, str]]:
    for code, meaning in re.findall(r"^ +(\d+)  (.*)$", text, re.MULTILINE):
        yield int(code), meaning


def bare(kind: type[BaseException]) -> BaseException:
    """Return an instance without a call of its constructor."""
    return kind.__new__(kind)


# -- errors ---------------------------------------------------------------------------------------------------------


def errors() -> list[type[BaseException]]:
    """Return the errors of the packages, parents before children."""
    from elastic.errors import ElasticError, WorldChanged
    from peerstore.errors import PeerStoreError
    from tieredckpt.errors import TieredCheckpointError

    def tree(kind: type[BaseException]) -> Iterator[type[BaseException]]:
        yield kind
        for child in kind.__subclasses__():
            if child.__module__ == kind.__module__:
                yield from tree(child)

    roots = (TieredCheckpointError, ElasticError, WorldChanged, PeerStoreError)
    return [kind for root in roots for kind in tree(root)]


def errors_page() -> str:
    """Return the page of all errors: where to import them from, when they are raised, and what to do."""
    import tieredckpt

    found = errors()
    compare("ERRORS", {one.__name__ for one in found}, ERRORS)
    start = (
        f"# Errors and exit codes\n\n{GENERATED}\n\nCatch the parent to catch its children. `dcp.save` and `dcp.load` "
        "wrap errors in DCP's `CheckpointException`; the error of this rank is in `TieredReader.error` and "
        "`TieredWriter.error`. The last section lists the [codes](#exit-codes) with which commands end.\n\n"
        "**Absent, unreachable and damaged are different answers.** After `CheckpointNotFoundError` a job may start "
        "fresh. After `TierUnavailableError` it may not: the checkpoint can exist."
    )
    blocks = [start]
    for package in ("tieredckpt", "elastic", "peerstore"):
        rows = ["| error | parent | raised when | what to do |", "|---|---|---|---|"]
        for kind in found:
            if kind.__module__ != f"{package}.errors":
                continue
            place = "tieredckpt" if kind.__name__ in tieredckpt.__all__ else kind.__module__
            when, action = ERRORS[kind.__name__]
            rows.append(f"| `{place}.{kind.__name__}` | `{kind.__bases__[0].__name__}` | {when} | {action} |")
        blocks.append(f"## {package}\n\n" + "\n".join(rows))
    blocks += exit_code_blocks()
    return "\n\n".join(blocks) + "\n"


def compare(name: str, found: set[str], described: Mapping[str, Any]) -> None:
    """Raise LookupError if the descriptions and the code do not name the same things."""
    if found != described.keys():
        missing, left_over = sorted(found - described.keys()), sorted(described.keys() - found)
        raise LookupError(f"{name} of docs/reference_texts.py lacks {missing}, and has {left_over} too many")


# -- metrics --------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]


def metrics_part() -> str:
    """Return the sections of all metrics of the agent, of its memory service and of `tieredckpt goodput`."""
    agent, service = (list(metrics_of(ROOT / module)) for module in METRIC_MODULES)
    goodput = list(goodput_metrics(ROOT / GOODPUT_MODULE))
    compare("METRICS", {one.name for one in [*agent, *service, *goodput]}, METRICS)
    titles = ("Node agent", "Memory service", "tieredckpt goodput --prometheus")
    blocks: list[str] = []
    for title, found in zip(titles, (agent, service, goodput), strict=True):
        rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        for name, kind, labels in found:
            rows.append(f"| `{name}` | {kind} | {', '.join(f'`{one}`' for one in labels)} | {METRICS[name]} |")
        blocks.append(f"### {title}\n\n" + "\n".join(rows))
    return "\n\n".join(blocks)


def metrics_of(path: Path) -> Iterator[Metric]:
    """Yield the metrics that a module creates as Prometheus families, by its syntax tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tables = {
        one.target.id: first_strings(one.value.keys)
        for one in ast.walk(tree)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(one.value, ast.Dict)
    }
    yield from families(tree, [], tables)


def families(node: ast.AST, loops: list[ast.For], tables: Mapping[str, list[str]]) -> Iterator[Metric]:
    """Yield the metrics below a node; loops over tables of names create one each."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        labels = tuple(
            name
            for word in node.keywords
            if word.arg == "labels"
            for name in first_strings(getattr(word.value, "elts", []))
        )
        name = node.args[0]
        if node.func.id.endswith("MetricFamily") and isinstance(name, ast.Constant):
            yield metric(name.value, node.func.id, labels)
        elif node.func.id.endswith("MetricFamily") and isinstance(name, ast.JoinedStr):
            for one in first_strings(getattr(loops[-1].iter, "elts", [])):
                yield metric(prefix(name) + one, node.func.id, labels)
        elif node.func.id == "kind" and isinstance(name, ast.JoinedStr):
            for pair in getattr(loops[-2].iter, "elts", []):
                family, table = pair.elts
                for one in tables[table.id]:
                    yield metric(prefix(name) + one, family.id, labels)
    inside = [*loops, node] if isinstance(node, ast.For) else loops
    for child in ast.iter_child_nodes(node):
        yield from families(child, inside, tables)


def goodput_metrics(path: Path) -> Iterator[Metric]:
    """Yield the gauges of `tieredckpt goodput --prometheus`; every one has the label `job`."""
    [function] = (
        one
        for one in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(one, ast.FunctionDef) and one.name == "_families"
    )
    source = ast.unparse(function)
    named = re.findall(
        r"one\('(\w+)'|\('(\w+_seconds)', '|'(tieredckpt_\w+)'|f'(tieredckpt_\w+)\{share\}(\w+)'", source
    )
    for plain, mean, full, start, end in named:
        for name in [f"{start}{share}{end}" for share in ("p50", "p99")] if start else [full or plain or mean]:
            yield Metric(name if name.startswith("tieredckpt_") else f"tieredckpt_{name}", "gauge", ("job",))


def metric(name: str, family: str, labels: tuple[str, ...]) -> Metric:
    """Return a metric by the name that a scrape shows: counters end with `_total`."""
    kind = family.removesuffix("MetricFamily").lower()
    return Metric(f"{name}_total" if kind == "counter" else name, kind, labels)


def prefix(name: ast.JoinedStr) -> str:
    first = name.values[0]
    return first.value if isinstance(first, ast.Constant) else ""


def first_strings(nodes: Iterable[ast.AST | None]) -> list[str]:
    """Return the strings among the nodes, and the first elements of tuples among them."""
    firsts = (one.elts[0] if isinstance(one, ast.Tuple) else one for one in nodes)
    return [one.value for one in firsts if isinstance(one, ast.Constant)]


# -- operations of the agent ------------------------------------------------------------------------------------------


def agent_operations_part() -> str:
    """Return the sections of the operations that an agent serves on its socket."""
    from peerstore.client.store_methods import STORE_METHODS
    from tieredckpt.agent.agent_methods import AGENT_METHODS

    checkpoints = "### Operations on checkpoints\n\nTypes: `tieredckpt/agent/agent_methods.py`."
    shards = (
        "### Operations on shards in memory\n\nTypes: `peerstore/client/store_methods.py`. The answers of `pin` and "
        "`open_slot` also carry an open file."
    )
    return "\n\n".join((checkpoints, _method_table(AGENT_METHODS), shards, _method_table(STORE_METHODS)))


def _method_table(methods: Sequence[Method[Any, Any]]) -> str:
    rows = ["| operation | request | result | purpose |", "|---|---|---|---|"]
    for method in methods:
        fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(method.request))
        rows.append(f"| `{method.name}` | {fields} | {result_name(method.result)} | {method.summary} |")
    return "\n".join(rows)


def result_name(result: Any) -> str:
    """Return a result's type as text; nothing for an operation without a result."""
    if result is type(None):
        return ""
    name = result.__name__ if isinstance(result, type) and not get_args(result) else str(result)
    return f"`{re.sub(r'[a-z_]+(?:[.][a-z_]+)*[.](?=[A-Z])', '', name).replace('|', 'or')}`"
