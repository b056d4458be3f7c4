"""``make test-gpu``: sections, limits, killed sections, report and installation."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from tests.gpu import supervise
from tests.gpu.__main__ import SECTIONS, TOTAL_S, Planned, added, chosen_from, keep_result, limits, main, run_sections
from tests.gpu.findings import FILE, read, record
from tests.gpu.install import REQUIREMENTS, packages_of, pip_arguments, refusal
from tests.gpu.report import Check, Fact, Figure, Report, Section, merged, page, shown, slug
from tests.support.leaks import process_prefix
from tests.support.zygote import has_ended

ROOT = Path(__file__).parents[3]
_PATIENCE_S = 60.0

pytestmark = pytest.mark.slow


def section_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """Write a module with ``run`` and return its name."""
    name = process_prefix("gpusection").replace("-", "_") + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return name


def test_report_without_accelerator_passes_and_names_fakes():
    checks = [Check("a", "passed", 1.0), Check("<b>", "not run", why="no accelerator")]
    report = Report([], {"torch": "2"}, [Section("seam", "finished", 10.0, 1.0, checks=checks)])
    assert report.passed
    assert report.title == "no accelerator: on fakes, which prove order and no speed: 1 passed, 0 failed, 1 not run"
    assert "&lt;b&gt;" in page(report)


def test_report_on_device_fails_with_a_failed_check():
    figure = Figure("save", 0.128, "s", "cuda:0", ratio=1.08, bits="equal")
    section = Section("saves", "finished", 10.0, 1.0, checks=[Check("a", "failed")], figures=[figure])
    report = Report(["cuda:0"], {}, [section])
    assert not report.passed
    assert report.title == "cuda:0: 0 passed, 1 failed, 0 not run"
    assert "<td>0.128 s</td><td>1.08 R</td><td>equal</td><td>cuda:0</td>" in page(report)


def test_report_fails_with_an_unfinished_but_not_with_a_missing_section():
    missing = Section("golden", "not run", 10.0, why="tests/gpu/golden.py is missing")
    assert Report([], {}, [missing]).passed
    cut = Section("seam", "not finished", 10.0, 10.0, "not finished in 10 s", "the last line")
    report = Report([], {}, [missing, cut])
    assert not report.passed
    assert report.title.endswith("; not finished: seam")
    assert "<pre>the last line</pre>" in page(report)
    assert "golden.py is missing" in page(report)


def test_page_shows_failed_checks_first_and_short_numbers():
    assert [shown(value) for value in (0.4677, 25.5, 601.77, 8874.2)] == ["0.468", "25.5", "602", "8,874"]
    checks = [Check("good", "passed"), Check("left out", "not run"), Check("bad", "failed", why="a\nb")]
    text = page(Report([], {}, [Section("seam", "finished", 1.0, checks=checks)]))
    assert text.index("bad") < text.index("left out") < text.index(">good<")


def test_sections_fit_into_eight_minutes():
    assert sum(one.limit_s for one in SECTIONS) <= TOTAL_S < 480
    assert all(one.limit_s >= 30 for one in SECTIONS)


def test_limits_give_unused_time_to_later_sections():
    chosen = [Planned("a", "", 10.0, ""), Planned("b", "", 20.0, ""), Planned("c", "", 30.0, "")]
    assert limits(chosen, []) == 10.0
    assert limits(chosen, [4.0]) == 26.0
    assert limits(chosen, [4.0, 26.0]) == 30.0
    assert limits(chosen, [12.0, 20.0]) == 30.0, "a kill takes time, but takes none from the next section"


def test_only_keeps_the_environment_and_refuses_unknown_names(capsys):
    assert [one.name for one in chosen_from("golden,copies")] == ["environment", "copies", "golden"]
    with pytest.raises(SystemExit):
        main(["--only", "speed"])
    assert "no section speed; there are aborts, copies" in capsys.readouterr().err


def test_list_names_every_section_with_its_limit(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in SECTIONS]


def test_findings_survive_a_line_that_was_cut(tmp_path):
    kept = [Fact("torch", "2"), Check("a", "passed"), Figure("copy", 1.5, "GB/s")]
    record(tmp_path, *kept)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"type":"Check","na')
    assert read(tmp_path) == kept


def test_timed_out_section_is_killed_with_its_children(tmp_path, monkeypatch):
    module = section_of(
        tmp_path,
        monkeypatch,
        """
        import subprocess, sys, time
        from tests.gpu.report import Check

        def run(device, out, limit_s):
            yield Check("before", "passed")
            command = [sys.executable, "-c", "import signal; signal.pause()"]
            for detached in (False, True):
                child = subprocess.Popen(command, start_new_session=detached)
                with (out / "pids").open("a") as file:
                    file.write(f"{child.pid} ")
            print("in the middle of it")
            while True:
                time.sleep(60)
        """,
    )
    waited = []
    wait = supervise.subprocess.Popen.wait

    def when_both_run(process, timeout=None):
        """Stands for a limit that ends when the section has started its processes."""
        if timeout is None or waited:
            return wait(process, timeout)
        waited.append(timeout)
        pids = tmp_path / "out/pids"
        deadline = time.monotonic() + _PATIENCE_S
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert time.monotonic() < deadline, (tmp_path / "out/log.txt").read_text()
            time.sleep(0.01)
        raise supervise.subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(supervise.subprocess.Popen, "wait", when_both_run)
    section, facts = supervise.supervised("slow", module, tmp_path / "out", 7.0)
    assert section.outcome == "not finished"
    assert section.why == "not finished in 7 s: its processes were killed"
    assert section.checks == [Check("before", "passed")]
    assert "in the middle of it" in section.log
    assert "in run" in section.log, "the stack of the thread that hung"
    assert [one.name for one in facts] == ["devices"]
    for pid in (tmp_path / "out/pids").read_text().split():
        assert has_ended(int(pid), _PATIENCE_S)


def test_section_that_raises_has_failed_and_the_others_run(tmp_path, monkeypatch):
    module = section_of(tmp_path, monkeypatch, "def run(device, out, limit_s):\n    raise OSError('no driver')\n")
    section, _ = supervise.supervised("broken", module, tmp_path / "out", _PATIENCE_S)
    assert section.outcome == "failed"
    assert "OSError: no driver" in section.log


def test_section_that_records_nothing_has_failed(tmp_path, monkeypatch):
    module = section_of(tmp_path, monkeypatch, "def run(device, out, limit_s):\n    return None\n")
    section, _ = supervise.supervised("empty", module, tmp_path / "out", _PATIENCE_S)
    assert (section.outcome, section.why) == ("failed", "it recorded no check and no figure")


def test_report_is_written_after_every_section(tmp_path, monkeypatch):
    seen = []

    def ran(name, module, out, limit_s):
        seen.append((tmp_path / "report.json").exists())
        return Section(name, "finished", limit_s, 1.0), [Fact("devices", "cuda:0"), Fact("torch", "2")]

    monkeypatch.setattr("tests.gpu.__main__.supervised", ran)
    chosen = [SECTIONS[0], Planned("absent", "", 1.0, "no_such_section.py"), SECTIONS[1]]
    report = run_sections(chosen, tmp_path)
    assert seen == [False, True]
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report
    assert (report.devices, report.environment) == (["cuda:0"], {"torch": "2"})
    absent = report.sections[1]
    assert (absent.outcome, absent.why) == ("not run", "tests/gpu/no_such_section.py is missing")
    assert "absent: not run" in (tmp_path / "report.html").read_text()


def test_added_section_without_devices_leaves_them():
    report = added(Report(["cuda:0"], {}, []), Section("golden", "not run", 1.0), [])
    assert report.devices == ["cuda:0"]


def test_result_is_kept_for_devices_only_and_sections_of_a_day_are_merged(tmp_path):
    environment = {"device": "NVIDIA H100 80GB HBM3", "revision": "abc"}
    first = Report(["cuda:0"], environment, [Section("copies", "finished", 1.0), Section("seam", "finished", 1.0)])
    later = Report(["cuda:0"], environment, [Section("seam", "not finished", 2.0)])
    file = keep_result(first, tmp_path, "2026-11-26")
    assert file == tmp_path / "gpu-nvidia-h100-80gb-hbm3-2026-11-26.json"
    keep_result(later, tmp_path, "2026-11-26")
    assert msgspec.json.decode(file.read_bytes(), type=Report) == merged(first, later)
    assert [one.name for one in merged(first, later).sections] == ["seam", "copies"]
    other = Report(["cuda:0"], {**environment, "revision": "def"}, later.sections)
    keep_result(other, tmp_path, "2026-11-26")
    assert msgspec.json.decode(file.read_bytes(), type=Report) == other
    assert keep_result(Report([], {}, []), tmp_path, "2026-11-26") is None
    assert slug("AMD Instinct MI300X (gfx942)") == "amd-instinct-mi300x-gfx942"


def test_modules_and_tests_of_the_sections_exist():
    from tests.gpu import golden, seam

    assert [name for name in (*seam.CHECKED, golden.IN_A_COLLECTIVE) if not (ROOT / name).is_file()] == []
    assert golden.TRAINER.is_file()
    assert [one.name for one in SECTIONS if not (ROOT / "tests/gpu" / one.file).is_file()] == []


def test_run_tests_records_failed_skipped_and_unloadable_tests(tmp_path):
    from tests.gpu.checked import run_tests

    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property):\n"
        "    record_property('a way', 3.5)\n"
        "    record_property('memory', (2, 'MiB'))\n"
        "def test_bad(): assert 0\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_skipped(): pass\n"
        "@pytest.mark.system\n"
        "def test_left_out(): pass\n"
        "def test_fake(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    run_tests(
        tmp_path,
        [str(tmp_path)],
        timeout_s=_PATIENCE_S,
        leave_out=lambda item: "a fake" if item.name == "test_fake" else "",
        arguments=["--continue-on-collection-errors"],
    )
    found = read(tmp_path)
    checks = {one.name.rpartition("::")[2].rpartition("/")[2]: one for one in found if isinstance(one, Check)}
    assert checks["test_good"].outcome == "passed"
    assert checks["test_bad"].outcome == "failed"
    assert (checks["test_skipped"].outcome, checks["test_skipped"].why) == ("not run", "Skipped: no device")
    assert checks["test_left_out"].outcome == "not run"
    assert (checks["test_fake"].outcome, checks["test_fake"].why) == ("not run", "a fake")
    assert checks["test_broken.py"].outcome == "failed"
    figures = [(one.name, one.value, one.unit) for one in found if isinstance(one, Figure)]
    assert figures == [("a way", 3.5, "ms"), ("memory", 2.0, "MiB")]


def test_install_refuses_other_pythons_and_old_torch_and_none():
    assert refusal((3, 12), "2.11.0+cu130") == refusal((3, 10), "2.13.0") == ""
    assert "Python 3.9 is not supported" in refusal((3, 9), "2.11.0")
    assert "Python 3.14 is not supported" in refusal((3, 14), "2.11.0")
    assert "torch 2.10.1 is too old" in refusal((3, 12), "2.10.1")
    assert "has no torch" in refusal((3, 12), "")


def test_install_reads_no_index_with_wheels_and_never_names_torch(tmp_path):
    arguments = pip_arguments(tmp_path / "constraints.txt", tmp_path)
    assert arguments[arguments.index("--find-links") + 1] == str(tmp_path)
    assert "--no-index" in arguments
    assert "--no-index" not in pip_arguments(tmp_path / "constraints.txt", None)
    required = [line.split(">=")[0] for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert "torch" not in required
    assert "msgspec" in required


def test_install_sees_the_packages_of_the_virtual_environment_below():
    path = ["", "/usr/lib/python3.12", "/opt/venv/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"]
    assert packages_of(path, "/opt/venv") == ["/opt/venv/lib/python3.12/site-packages"]
    assert packages_of(path, "/usr") == ["/usr/lib/python3/dist-packages"]


def test_difference_compares_bits_and_names_a_tensor():
    import torch

    from tests.gpu.saves import advance, blank, difference, model, size_of, wipe

    state = model(1 << 20, torch.device("cpu"))
    assert abs(size_of(state) - (4 << 20)) < (1 << 20), "one layer at least"
    same = {name: one.clone() for name, one in state.items()}
    assert difference(state, same) == "equal"
    same["model.0.o"].view(torch.int16)[-1, -1] ^= 1
    assert difference(state, same) == "model.0.o differs"
    advance(state)
    assert all(difference({name: state[name]}, {name: same[name]}) != "equal" for name in state)
    wipe(state)
    assert difference(state, blank(same)) == "equal"
    assert os.environ.get("TEST_GPU_SIZE") is None
