"""The dashboard and the alert rules use only metrics and labels that the product has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.event_logs import EventLogBuilder
from tieredckpt.cli.goodput import prometheus_text
from tieredckpt.goodput import analyse
from tieredckpt.metrics_dashboard import ALERTS, ROWS, grafana_dashboard, prometheus_rules

ROOT = Path(__file__).parents[3]
SCRAPE_LABELS = {"instance"}
"""Labels that Prometheus adds to the metrics of a target."""
FUNCTIONS = {"sum", "min", "max", "count", "rate", "increase", "changes", "count_over_time", "label_values"}
KEYWORDS = {"and", "or", "unless", "offset"}
GROUPS = {"by", "on"}
TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])"""
    r"""|(?P<duration>\d+[smhd]\b)|(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_]\w*)|(?P<sign>=~|!~|!=|==|>=|[-+*/><={}(),])"""
)


def tokens(expr):
    """Return the tokens of an expression as pairs of kind and text. Unknown text is an error."""
    found, position = [], 0
    while position < len(expr):
        match = TOKEN.match(expr, position)
        assert match, f"{expr!r} has unknown syntax at {expr[position:]!r}"
        position = match.end()
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[0]))
    return found


class Expression:
    """Metrics of an expression with their matchers, and its grouping labels."""

    def __init__(self, expr):
        self.metrics = []
        """Pairs of a metric and its matchers, each matcher a triple of label, operator and value."""
        self.groups = set()
        self._rest = tokens(expr)
        while self._rest:
            kind, text = self._rest.pop(0)
            if text in GROUPS:
                self.groups |= set(self._names())
            elif kind == "name" and text not in FUNCTIONS | KEYWORDS:
                self.metrics.append((text, self._matchers()))

    def _take(self, *allowed):
        kind, text = self._rest.pop(0)
        assert kind in allowed or text in allowed, f"{text!r} instead of {allowed}"
        return text

    def _names(self):
        self._take("(")
        while True:
            yield self._take("name")
            if self._take(",", ")") == ")":
                return

    def _matchers(self):
        found = []
        if not self._rest or self._rest[0][1] != "{":
            return found
        self._take("{")
        while True:
            found.append((self._take("name"), self._take("=", "=~", "!=", "!~"), self._take("string")[1:-1]))
            if self._take(",", "}") == "}":
                return found


@pytest.fixture(scope="module")
def registered():
    """Return the labels of each metric that the agent, or `tieredckpt goodput --prometheus`, has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        import reference_pages
    found = {one.name: set(one.labels) for one in reference_pages.metrics_of(ROOT / reference_pages.METRIC_MODULES[0])}
    assert len(found) > 40
    run = EventLogBuilder().process_began(0).world_formed(1, ranks=2).steps(0, 5, at=2)
    run.fault(7.6, since=7.5, node="n1", local_rank=0, reason="it was ended by SIGKILL").world_formed(8, epoch=1)
    for family in text_string_to_metric_families(prometheus_text(analyse(run.steps(4, 6, at=10, epoch=1).events))):
        for sample in family.samples:
            found[sample.name] = set(sample.labels)
    return {**found, "up": {"job"}}


@pytest.fixture(scope="module")
def trainer_values():
    """Return the names of the values that trainers report."""
    calls = [
        node
        for path in (ROOT / "tieredckpt").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_metrics", "_report", "submit")
    ]
    found = {word.arg for call in calls for word in call.keywords if word.arg}
    observe = (ROOT / "tieredckpt/checkpointer/checkpointer.py").read_text(encoding="utf-8")
    return found | set(re.findall(r'SaveState\.\w+: "(\w+)"', observe))


def queries():
    return [query for row in ROWS.values() for panel in row for query in panel.queries]


def expressions():
    variables = [one["definition"] for one in grafana_dashboard()["templating"]["list"] if "definition" in one]
    return [*(query.expr for query in queries()), *(alert.expr for alert in ALERTS), *variables]


def check(expr, registered, values=None):
    """Raise an AssertionError for a metric, label or trainer value that does not exist."""
    parsed = Expression(re.sub(r", (\w+)\)$", r") by (\1)", expr) if expr.startswith("label_values") else expr)
    assert parsed.metrics
    for name, matchers in parsed.metrics:
        assert name in registered, f"{name} is not registered"
        labels = registered[name] | SCRAPE_LABELS
        used = {label for label, _, _ in matchers} | parsed.groups
        assert used <= labels, f"{name} has no label {used - labels}"
        for label, _, value in matchers:
            if name == "tieredckpt_trainer_total" and label == "what" and values is not None:
                assert set(value.split("|")) <= values, f"trainers report no {value}"


@pytest.mark.parametrize("expr", expressions())
def test_expression_uses_registered_metrics_and_labels(expr, registered, trainer_values):
    check(expr, registered, trainer_values)


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("rate(tieredckpt_seals[5m])", "tieredckpt_seals is not registered"),
        ('tieredckpt_peers_alive{node="n1"}', "has no label {'node'}"),
        ("sum by (job) (tieredckpt_seals_total)", "has no label {'job'}"),
        ('tieredckpt_trainer_total{what="saved"}', "trainers report no saved"),
        ("tieredckpt_seals_total @ 5", "unknown syntax"),
        ("label_values(tieredckpt_seals_total, job)", "has no label {'job'}"),
    ],
)
def test_wrong_expression_is_found(expr, message, registered, trainer_values):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(expr, registered, trainer_values)


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.expr)
def test_legend_uses_labels_of_the_result(query, registered):
    parsed = Expression(query.expr)
    labels = set.intersection(*(registered[name] | SCRAPE_LABELS for name, _ in parsed.metrics))
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= (parsed.groups or labels)
    if query.expr.startswith(("sum(", "count(")):
        assert "{{" not in query.legend


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_names_labels_of_its_result(alert, registered):
    parsed = Expression(alert.expr)
    labels = set.intersection(*(registered[name] | SCRAPE_LABELS for name, _ in parsed.metrics))
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    assert named
    assert named <= (parsed.groups or labels)
    assert "$labels" in alert.summary
    assert alert.severity in ("critical", "warning")


def test_legends_of_a_panel_are_distinct():
    for row in ROWS.values():
        for panel in row:
            assert len({query.legend for query in panel.queries}) == len(panel.queries), panel.title


def test_panels_do_not_overlap_and_stay_in_the_grid():
    cells = set()
    for panel in grafana_dashboard()["panels"]:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        assert 0 <= x < x + w <= 24, panel["title"]
        covered = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert not covered & cells, panel["title"]
        cells |= covered


def test_ids_and_names_are_unique():
    panels = grafana_dashboard()["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    assert len({one["title"] for one in panels}) == len(panels)
    assert len({one.name for one in ALERTS}) == len(ALERTS)
    for panel in panels:
        targets = panel.get("targets", [])
        assert len({one["refId"] for one in targets}) == len(targets)


def test_every_variable_of_a_query_is_defined():
    dashboard = grafana_dashboard()
    defined = {one["name"] for one in dashboard["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(str(panel) for panel in dashboard["panels"])))
    assert used == defined


def test_every_alert_links_its_section_of_the_runbook():
    from markdown_it import MarkdownIt

    links = [rule["annotations"]["runbook"] for rule in prometheus_rules()["groups"][0]["rules"]]
    for link in links:
        name, _, anchor = link.partition("#")
        parsed = MarkdownIt("commonmark").parse((ROOT / name).read_text(encoding="utf-8"))
        headings = [parsed[i + 1].content for i, token in enumerate(parsed) if token.type == "heading_open"]
        assert anchor in {one.lower().replace(" ", "-") for one in headings}
    assert len(set(links)) == len(ALERTS)


def test_metrics_page_lists_every_alert():
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[`(\w+)`\]\(\.\./troubleshooting\.md#(\w+)\)", page, re.MULTILINE)
    assert named == [(alert.name, alert.name.lower()) for alert in ALERTS]


def test_descriptions_name_existing_commands_and_settings():
    from elastic.cli import elastic_commands
    from tieredckpt.cli import tieredckpt_cli
    from tieredckpt.settings import load_settings

    programs = {"tieredckpt": tieredckpt_cli, "elastic": elastic_commands}
    settings = load_settings()
    for alert in ALERTS:
        for program, command in re.findall(r"`(tieredckpt|elastic) ([a-z]+)", alert.description):
            assert command in programs[program].builtin_commands
        for section, key in re.findall(r"\b(agent|durable|peer)\.([a-z_]+)", alert.description):
            assert hasattr(getattr(settings, section), key), f"{section}.{key}"
