"""Pages of agents, coordinators and reports in Chromium: narrow and wide, light and dark."""

from __future__ import annotations

import pytest

from tests.support.browser import CHROMIUM, open_browser
from tests.support.elastic_pages import run_with_page
from tests.support.jobs import CheckpointJob
from tieredckpt.cli import main
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.system, pytest.mark.skipif(CHROMIUM is None, reason="not installed: chromium")]
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def browser():
    with open_browser() as one:
        yield one


@pytest.fixture
def check(browser):
    """Check that a page is shown without errors and is not wider than the window, and return its words."""

    def shown(url):
        browser.messages.clear()
        backgrounds = set()
        for width in (PHONE, DESKTOP):
            for dark in (False, True):
                browser.open(url, width=width, dark=dark)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2, "light and dark look the same"
        assert browser.messages == []
        return " ".join(browser.evaluate("document.body.innerText").split())

    return shown


def test_page_of_an_agent(agent_dir, tmp_path, monkeypatch, check):
    monkeypatch.setenv("TIEREDCKPT_AGENT_HTTP", "127.0.0.1:0")
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable"))
    with job.checkpointer() as ckpt:
        ckpt.save({"w": 1}, 1, durable=True).wait("durable")
        assert job.name in check(f"http://{(agent_dir / 'http').read_text()}")


def test_page_of_a_coordinator_and_report_of_the_run(check, tmp_path):
    with run_with_page() as run:
        run.wait_paused()
        assert "start, world 0" in check(f"http://{run.address}")
        run.recover()
        assert "respawn, world 1" in check(f"http://{run.address}")
        assert run.finish() == 0, run.job.output()
        assert main(["goodput", str(run.job.folder / "logs/event-log"), "--html", str(tmp_path / "run.html")]) == 0
        assert "Where the time went" in check(f"file://{tmp_path}/run.html")
