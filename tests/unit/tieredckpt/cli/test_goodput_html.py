"""``tieredckpt goodput --html`` writes a complete file or none."""

import msgspec
import pytest

from tests.support.synthetic_event_logs import SyntheticJob
from tieredckpt.cli import main
from tieredckpt.goodput import analyse
from tieredckpt.goodput.html_report import html_report


@pytest.fixture
def told():
    return SyntheticJob(steps=12, faults=1, resizes=0)


@pytest.fixture
def ledger(tmp_path, told):
    folder = tmp_path / "ledger"
    folder.mkdir()
    lines = [msgspec.json.encode(one) + b"\n" for one in told.events]
    (folder / "n0.1.2.jsonl").write_bytes(b"".join(lines) + b'{"event":"st')
    return folder


def test_html_report_of_an_event_log_is_written(tmp_path, told, ledger, capsys):
    out = tmp_path / "report.html"
    out.write_text("old")
    assert main(["goodput", str(ledger), "--html", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == html_report(analyse(told.events))
    assert "goodput" in capsys.readouterr().out
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ledger", "report.html"]


def test_beside_json(tmp_path, ledger, capsys):
    assert main(["goodput", str(ledger), "--json", "--html", str(tmp_path / "report.html")]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["faults"] == 1


@pytest.mark.parametrize("place", ["", "nowhere/report.html"])
def test_invalid_file_locations_are_refused(tmp_path, ledger, capsys, place):
    assert main(["goodput", str(ledger), "--html", str(tmp_path / place)]) == 2
    assert "--html" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["ledger"]


def test_not_while_watching(tmp_path, ledger, capsys):
    assert main(["goodput", str(ledger), "--watch", "--html", str(tmp_path / "report.html")]) == 2
    assert "--html" in capsys.readouterr().err
