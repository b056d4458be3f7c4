"""The page of an analysis: complete, self-contained, safe, and with the same numbers."""

import html.parser
import re
import xml.etree.ElementTree as ET

import pytest

from tests.support.event_logs import START, EventLogBuilder
from tests.support.synthetic_event_logs import SyntheticJob
from tieredckpt.event_log.event_types import SaveEvent
from tieredckpt.goodput import TimeCategory, analyse
from tieredckpt.goodput.html_report import html_report
from tieredckpt.goodput.html_report.elements import element, to_markup

SECTIONS = ["summary", "timeline", "recoveries", "faults", "loss", "throughput", "saves", "restores", "resizes"]
EVIL = "</title></svg><script>alert('x')</script>\"'><img src=http://x onerror=y>&amp; \x1b[31m\x00"

JOBS = {
    "nothing": [],
    "began": EventLogBuilder().process_began(0).events,
    "seconds": SyntheticJob(steps=12, step_s=0.8, faults=1, resizes=0).events,
    "minutes": SyntheticJob().events,
    "no fault, no loss": SyntheticJob(steps=30, faults=0, resizes=0, losses=False).events,
    "days": SyntheticJob(steps=600, step_s=1400.0, faults=70, resizes=3, ranks=512, slow=20, seed=1).events,
    "two runs": EventLogBuilder()
    .process_began(0)
    .world_formed(1)
    .steps(0, 3, at=2)
    .process_began(50)
    .world_formed(51)
    .steps(2, 3, at=52)
    .process_ended(56)
    .events,
    "job failed": EventLogBuilder()
    .process_began(0)
    .world_formed(1)
    .steps(0, 3, at=2)
    .fault(5.5)
    .process_ended(9, how="job failed", words="too often")
    .events,
}


@pytest.fixture(scope="module", params=JOBS)
def job(request):
    analysis = analyse(JOBS[request.param])
    return analysis, html_report(analysis)


class Parsed(html.parser.HTMLParser):
    """A page as a browser parses it: matching tags, text, and every attribute."""

    VOID = ("meta", "br")

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.sections = [], [], [], [], []
        self.values = {}
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, key, value) for key, value in attributes]
        if name not in self.VOID:
            self.open.append(name)
        if name == "section":
            self.sections.append(dict(attributes)["id"])

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, words):
        self.words.append((self.open[-1] if self.open else "", words))


def tile(source, name):
    """Return the number next to a headline."""
    found = re.search(rf'<dt>{name}</dt><dd class="value"><data value="([^"]*)">', source)
    assert found, name
    return float(found[1])


def test_page_has_every_section(job):
    _, source = job
    assert [one for one in Parsed(source).sections if one not in ("runs", "event-log")] == SECTIONS


def test_report_is_self_contained(job):
    _, source = job
    parsed = Parsed(source)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"} & set(parsed.tags)
    assert not [key for _, key, _ in parsed.attributes if key in ("src", "href", "xlink:href") or key.startswith("on")]
    assert not re.search(r"url\(|@import|https?:|//[a-z]", source)


def test_pictures_are_well_formed(job):
    _, source = job
    pictures = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    assert pictures
    for picture in pictures:
        root = ET.fromstring(picture)
        for one in root.iter():
            assert not re.search(
                r"nan|inf", " ".join(v for k, v in one.attrib.items() if k not in ("class", "aria-label"))
            )
            assert float(one.get("width", 0)) >= 0
            assert float(one.get("height", 0)) >= 0


def test_the_numbers_are_those_of_the_analysis(job):
    analysis, source = job
    assert tile(source, "goodput") == analysis.goodput
    assert tile(source, "ETTR") == analysis.ettr
    assert tile(source, "faults") == analysis.faults
    assert tile(source, "steps lost") == analysis.steps_lost
    assert tile(source, "steps") == analysis.steps_counted
    took = sorted(way.seconds for way in analysis.recoveries if way.category is TimeCategory.RECOVERY and way.resumed)
    if took:
        assert tile(source, "median recovery") == took[(len(took) + 1) // 2 - 1]
    if analysis.tokens:
        assert tile(source, "tokens") == analysis.tokens
    if analysis.save_s.count:
        assert tile(source, "a save") == analysis.save_s.p50_s
    spent = [int(one) for one in re.findall(r'<b><data value="(\d+)">', source.split('id="timeline"')[0])]
    assert sum(spent) == analysis.wall.total


def test_same_events_give_the_same_page():
    events = JOBS["minutes"]
    assert html_report(analyse(events)) == html_report(analyse(list(reversed(events))))


def test_report_stays_small():
    assert len(html_report(analyse(JOBS["days"]))) < 600_000


def test_event_log_text_is_escaped():
    said = (
        EventLogBuilder()
        .process_began(0, job=EVIL)
        .world_formed(1, reason=EVIL, nodes=(EVIL,))
        .steps(0, 4, at=2, loss=1.0)
    )
    said.stage(EVIL, 6.5, 0.5, epoch=1).fault_injected(6.1, EVIL, node=EVIL, words=EVIL)
    said.fault(6.3, node=EVIL, kind=EVIL, reason=EVIL).world_formed(6.4, epoch=1, how=EVIL, reason=EVIL, nodes=(EVIL,))
    said.restored(3, at=6.6, epoch=1, bytes_by_tier={EVIL: 5}).steps(4, 2, at=8, epoch=1)
    source = html_report(analyse(said.process_ended(10, how=EVIL, words=EVIL).events, warnings=[EVIL]))
    parsed = Parsed(source)
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    assert not [key for _, key, _ in parsed.attributes if key.startswith("on")]
    assert source.count("&lt;script&gt;") > 5
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", source)
    source.encode("utf-8")
    for picture in re.findall(r"<svg.*?</svg>", source, re.DOTALL):
        ET.fromstring(picture)


def test_halves_of_characters_can_be_written():
    assert to_markup("a\ud800b").encode() == "a\ufffdb".encode()
    assert element("p", "<", title='"') == '<p title="&quot;">&lt;</p>'


def test_few_faults_each_have_a_bar_and_many_are_summed_up():
    few, many = html_report(analyse(JOBS["minutes"])), html_report(analyse(JOBS["days"]))
    assert ">durations<" not in few
    assert few.count('class="mark"') == 3
    assert ">durations<" in many
    assert "faults one by one" in many
    assert "70 faults" in many


def test_losses_are_shown_where_recorded():
    with_, without = html_report(analyse(JOBS["minutes"])), html_report(analyse(JOBS["no fault, no loss"]))
    assert "loss over steps" in with_
    assert "loss over steps" not in without
    assert "No loss was reported" in without
    assert "tokens per second" in with_
    assert "steps per second" in without


def test_steps_that_were_undone_are_shown():
    analysis = analyse(JOBS["minutes"])
    assert analysis.steps_lost
    loss = html_report(analysis).split('id="loss"')[1].split("</section>")[0]
    assert loss.count('class="dot"') == 2 * analysis.steps_lost


def test_damage_of_the_event_log_is_shown():
    source = html_report(analyse(JOBS["seconds"], warnings=["3 damaged lines were passed over"]))
    assert Parsed(source).sections[-1] == "event-log"
    assert "3 damaged lines" in source


def test_runs_are_listed_where_there_were_several():
    source = html_report(analyse(JOBS["two runs"]))
    assert "runs" in Parsed(source).sections
    assert "not running" in source


def test_nonfinite_losses_and_injections_are_shown():
    told = EventLogBuilder().process_began(0).world_formed(1).steps(0, 4, at=2, loss=1.5)
    told.steps(4, 2, at=6, not_finite="nan").steps(6, 3, at=8, loss=1.25).fault_injected(6.5, "nan", step=4, node="n1")
    told.fault_injected(10.5, "sigkill", node="n0").fault(10.6, node="n0").process_ended(12)
    analysis = analyse(told.events)
    assert [(one.kind, one.step) for one in analysis.injections] == [("nan", 4)]
    source = html_report(analysis)
    assert "2 steps had a loss that is not finite (nan; steps 4 to 5)" in source
    assert source.count('class="bad"') == 4  # over steps and over time
    assert source.count('class="curve"') >= 4  # which have a gap
    assert "1 injection that broke no world" in source
    assert "injected: nan" in source
    only = html_report(
        analyse(
            EventLogBuilder()
            .process_began(0)
            .world_formed(1)
            .steps(0, 2, at=2, not_finite="inf")
            .process_ended(5)
            .events
        )
    )
    assert "2 steps had a loss that is not finite (inf; steps 0 to 1)" in only


def test_saves_block_the_training_as_long_as_they_do_on_the_time_line():
    told = EventLogBuilder().process_began(0).world_formed(0, ranks=4).steps(0, 10, at=0)
    for rank in range(4):
        told.add(*(SaveEvent(rank, step, "staged", START + step + 0.5, 0.25, 0) for step in range(10)))
    analysis = analyse(told.process_ended(10).events)
    assert analysis.wall.share("save") == pytest.approx(0.25)
    assert analysis.save_s.count == 40
    assert "40 saves, of all ranks; the training was blocked for 2.5 s in all, 25.0 % of the time" in html_report(
        analysis
    )


def test_when_the_job_was_unprotected_is_on_the_page():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 20, at=0)
        .protection(2, at=3)
        .protection(2, at=6, since=4, left_out=2)
    )
    told.protection(8, at=9).protection(9, at=10).protection(9, at=15, since=14, left_out=1).process_ended(20)
    source = html_report(analyse(told.events))
    assert tile(source, "protected up to") == 9
    assert "unprotected since 2023-11-14 22:13:34 UTC" in source.split('id="timeline"')[0]
    assert source.split('id="timeline"')[1].split("</section>")[0].count('class="unprotected"') == 2
    assert "newer than step 2" in source
    kept = html_report(
        analyse(
            EventLogBuilder()
            .process_began(0)
            .world_formed(0)
            .steps(0, 20, at=0)
            .protection(19, at=20)
            .process_ended(21)
            .events
        )
    )
    assert tile(kept, "protected up to") == 19
    assert 'class="unprotected"' not in kept
    assert "<dt>protected up to</dt>" not in html_report(analyse(JOBS["seconds"]))
