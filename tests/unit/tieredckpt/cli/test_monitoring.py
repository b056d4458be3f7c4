"""``tieredckpt monitoring`` prints or writes the dashboard and the rules."""

import json
from pathlib import Path

import pytest
import yaml

from tieredckpt.cli import main
from tieredckpt.metrics_dashboard import grafana_dashboard, prometheus_rules

EXAMPLES = Path(__file__).parents[4] / "examples/monitoring"
FILES = {
    "grafana": (EXAMPLES / "grafana-dashboard.json", json.loads, grafana_dashboard),
    "prometheus": (EXAMPLES / "prometheus-alerts.yaml", yaml.safe_load, prometheus_rules),
}


@pytest.mark.parametrize("kind", FILES)
def test_monitoring_prints_the_document(kind, capsys):
    assert main(["monitoring", kind]) == 0
    _, parse, document = FILES[kind]
    assert parse(capsys.readouterr().out) == document()


@pytest.mark.parametrize("kind", FILES)
def test_monitoring_json_is_the_same_document(kind, capsys):
    assert main(["monitoring", kind, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FILES[kind][2]()


@pytest.mark.parametrize("kind", FILES)
def test_committed_file_is_current(kind, tmp_path, capsys):
    written = tmp_path / "written"
    assert main(["monitoring", kind, "-o", str(written)]) == 0
    assert capsys.readouterr().out == f"Wrote {written}\n"
    assert FILES[kind][0].read_text() == written.read_text(), f"run `tieredckpt monitoring {kind} -o {FILES[kind][0]}`"


def test_unwritable_file_is_an_error_that_names_it(tmp_path, capsys):
    assert main(["monitoring", "grafana", "-o", str(tmp_path / "absent/file"), "--json"]) != 0
    assert "absent/file" in json.loads(capsys.readouterr().out)["error"]["message"]
