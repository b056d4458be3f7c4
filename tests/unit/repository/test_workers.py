"""The tests of a run, shared by forked workers: each runs once, and no failure is lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nightly.record import FlakyTest
from tests.support.flaky import RECORD
from tests.support.huge_pages import collapse_private_memory
from tests.support.revision import revision
from tests.support.workers import TIMED, Concurrency, Queue, Unit, make_units

pytestmark = pytest.mark.slow

FILES = st.sampled_from(["tests/unit/a.py", "tests/unit/b.py", "tests/e2e/c.py", *(start + "d.py" for start in TIMED)])
TESTS = st.lists(st.tuples(FILES, st.booleans()), max_size=30)


@given(TESTS, st.dictionaries(FILES, st.floats(0, 100)))
def test_tests_are_split_into_units_with_dependent_tests_together(tests, seconds):
    units = make_units(tests, seconds)
    assert sorted(position for unit in units for position in unit.tests) == [*range(len(tests))]
    for unit in units:
        (file,) = {tests[position][0] for position in unit.tests}
        assert bool(unit.timed) is file.startswith((*TIMED,))
        whole = [position for position, (other, _) in enumerate(tests) if other == file]
        together = any(stays for other, stays in tests if other == file)
        assert list(unit.tests) == whole if together else len(unit.tests) == 1


def test_longest_tests_start_first():
    tests = [("tests/unit/quick.py", True), ("tests/unit/slow.py", True), ("tests/e2e/unknown.py", True)]
    first, *_, last = make_units(tests, {"tests/unit/quick.py": 1.0, "tests/unit/slow.py": 100.0})
    assert (first.tests, last.tests) == ((1,), (0,))


def test_long_test_of_a_file_of_short_tests_starts_first():
    """Its file's average would start it after the tests of another file."""
    tests = [*((f"tests/unit/mixed.py::test_{n}", False) for n in range(9)), ("tests/unit/other.py::test_it", False)]
    seconds = {name: 0.1 for name, _ in tests} | {
        "tests/unit/mixed.py::test_7": 100.0,
        "tests/unit/other.py::test_it": 30.0,
    }
    assert [unit.tests for unit in make_units(tests, seconds)][:2] == [(7,), (9,)]


def test_tests_without_a_duration_start_before_short_ones():
    tests = [("tests/unit/a.py::test_a", False), ("tests/e2e/new.py::test_b", False)]
    assert [unit.tests for unit in make_units(tests, {"tests/unit/a.py::test_a": 0.1})] == [(1,), (0,)]


@given(TESTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_all_units_run_and_timed_kinds_run_alone(tests, at_once, random):
    units = make_units(tests, {})
    queue, running, ran, others = Queue(units), [], [], sum(not unit.timed for unit in units)
    while queue or running:
        while len(running) < at_once and (unit := queue.next()) is not None:
            timed = [one.timed for one in running if one.timed]
            if unit.timed:
                assert unit.timed not in timed or (len(timed) < 3 and others == 0)
            else:
                others -= 1
            running.append(unit)
        assert running, "nothing may begin and nothing is running"
        assert queue.running == len(running)
        done = running.pop(random.randrange(len(running)))
        queue.done(done)
        ran += done.tests
    assert sorted(ran) == [*range(len(tests))]


def test_timed_units_run_together_when_only_they_remain():
    queue = Queue([Unit((0,), 1.0), *(Unit((position,), 1.0, "nodes") for position in range(1, 6))])
    assert [queue.next().tests for _ in range(2)] == [(1,), (0,)]
    assert [queue.next().tests for _ in range(2)] == [(2,), (3,)]
    assert queue.next() is None


def test_waiting_tests_raise_the_concurrency_and_computing_tests_do_not():
    pace = Concurrency(least=3, most=6, now=3)
    for _ in range(5):
        pace.adjust(0.2, running=pace.now)
    assert pace.now == 6
    pace.adjust(0.9, running=6)
    assert pace.now == 6, "as it should be"
    for _ in range(5):
        pace.adjust(1.0, running=6)
    assert pace.now == 3
    pace.adjust(0.2, running=2)
    assert pace.now == 3, "that others wait was not for want of room"


def test_rest_of_a_unit_with_a_dead_worker_runs_next():
    queue = Queue([Unit((0, 1, 2), 1.0), Unit((3,), 1.0)])
    died = queue.next()
    queue.done(died)
    queue.requeue(Unit((2,), 1.0))
    queue.requeue(Unit((), 1.0))
    assert [queue.next().tests for _ in range(2)] == [(2,), (3,)]


def run_in(folder, *options):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "tests.support.workers",
         "-p", "no:cacheprovider", "-rA", *options, str(folder)],
        capture_output=True, text=True, timeout=120, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


OUTCOMES = """
import os, pytest
@pytest.fixture(scope="session")
def bad_end():
    yield
    raise ValueError("the session's fixture did not end")
@pytest.fixture(scope="module")
def once():
    return os.getpid()
seen = set()
def test_good(once): seen.add(once)
def test_same_process(once): assert seen == {os.getpid()}
def test_wrong(once): assert False, "said"
def test_dies(once): os._exit(7)
def test_after_it(once): pass
@pytest.mark.skip(reason="why")
def test_skipped(once): pass
"""


def test_failures_dead_workers_and_session_errors_are_reported(tmp_path):
    (tmp_path / "test_one.py").write_text(OUTCOMES)
    (tmp_path / "test_two.py").write_text("def test_other(): pass\ndef test_end(bad_end): pass\n")
    (tmp_path / "conftest.py").write_text(OUTCOMES.split('@pytest.fixture(scope="module")', maxsplit=1)[0])
    done = run_in(tmp_path, "--workers", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "its worker ended with status 7" in done.stdout
    assert "the session's fixture did not end" in done.stdout
    told = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("PASSED ", "FAILED ", "ERROR "))]
    assert sorted((name.split("::")[1], how) for how, name in told) == [
        ("test_after_it", "PASSED"), ("test_dies", "FAILED"), ("test_end", "ERROR"), ("test_end", "PASSED"),
        ("test_good", "PASSED"), ("test_other", "PASSED"), ("test_same_process", "PASSED"), ("test_wrong", "FAILED"),
    ]  # fmt: skip
    assert "2 failed, 5 passed, 1 skipped, 1 error" in done.stdout


BESIDE_OTHERS = """
import os, pytest
from pathlib import Path
RUNS = Path(__file__).with_name("runs")
def run(name):
    with RUNS.open("a") as file: file.write(f"{name} {os.getpid()}\\n")
    return sum(line.split()[0] == name for line in RUNS.read_text().splitlines())
@pytest.fixture
def bad_start(): assert run("start") > 1, "no start"
@pytest.fixture
def bad_end():
    yield
    assert run("end") > 1, "no end"
@pytest.fixture(scope="session")
def shared(): return run("shared")
def test_good(shared): run("good")
def test_call(shared): assert run("call") > 1, "said beside others"
def test_start(bad_start): pass
def test_end(bad_end): pass
def test_dies():
    if run("dies") == 1: os._exit(7)
"""
ALWAYS = """
def test_always():
    number = run("always")
    assert False, f"said in run {number}"
"""
RUNS_AND_ENDS = (
    BESIDE_OTHERS.split("@pytest", maxsplit=1)[0]
    + """
@pytest.mark.parametrize("number", range(8))
def test_number(number):
    runs = run(f"begin-{number}")
    run(f"end-{number}")
    assert runs > 1 or number < 4
"""
)
TWICE_BAD = """
def test_both(bad_end): assert run("both") > 1, "said in the call"
"""
AT_THE_END = """
@pytest.fixture(scope="session")
def lasting():
    yield
    raise ValueError("the session's fixture did not end")
def test_uses(lasting): pass
"""


def runs_of(folder):
    return [line.split()[0] for line in (folder / "runs").read_text().splitlines()]


def record_of(folder):
    path = folder / RECORD
    return (
        [msgspec.json.decode(line, type=FlakyTest) for line in path.read_bytes().splitlines()] if path.exists() else []
    )


def test_retry_that_passes_is_flaky_and_passes_the_run(tmp_path):
    (tmp_path / "test_one.py").write_text(BESIDE_OTHERS + TWICE_BAD)
    done = run_in(tmp_path, "--workers", "3", "--retry-failed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 5 flaky" in done.stdout.splitlines()[-1], "each test is counted once"
    for words in ("said beside others", "no start", "no end", "its worker ended with status 7", "said in the call"):
        assert words in done.stdout
    for test in ("call", "start", "end", "dies", "both"):
        assert f"flaky: test_one.py::test_{test}" in done.stdout.splitlines()
    assert "PASSED test_one.py::test_end" not in done.stdout
    ran = runs_of(tmp_path)
    assert ran.count("good") == 1
    assert ran.count("call") == 2
    lines = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    first, second = ([pid for name, pid in lines if name == "call"], [pid for name, pid in lines if name == "shared"])
    assert first[1] == second[-1] not in {pid for name, pid in lines if name in {"good", "start", "dies"}}, (
        "a process of its own, with fixtures of its own"
    )


def test_retries_run_alone_after_all_other_tests(tmp_path):
    (tmp_path / "test_one.py").write_text(RUNS_AND_ENDS)
    done = run_in(tmp_path, "--workers", "4", "--retry-failed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 4 flaky" in done.stdout.splitlines()[-1]
    lines = [line.split()[0].split("-") for line in (tmp_path / "runs").read_text().splitlines()]
    retries = lines[-8:]
    assert [what for what, _ in retries] == ["begin", "end"] * 4
    assert len({number for _, number in retries}) == 4
    assert {number for _, number in lines[:-8]} == set("01234567")


def test_flaky_test_is_recorded_with_revision_duration_and_error(tmp_path):
    (tmp_path / "test_one.py").write_text(BESIDE_OTHERS)
    for command in (["init", "-q"], ["add", "test_one.py"],
                    ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):  # fmt: skip
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    for _ in range(2):
        (tmp_path / "runs").unlink(missing_ok=True)
        run_in(tmp_path, "--workers", "3", "--retry-failed", "5")
    recorded = record_of(tmp_path)
    names = [f"test_one.py::test_{name}" for name in ("call", "dies", "end", "start")] * 2
    assert sorted(one.test for one in recorded) == sorted(names), "the second run appends"
    of = {one.test.partition("test_one.py::test_")[2]: one for one in recorded}
    assert of["call"].error == "AssertionError: said beside others"
    assert of["dies"].error == "test_one.py::test_dies: its worker ended with status 7"
    for one in recorded:
        assert one.revision == revision(tmp_path) != "unknown"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", one.date)
        assert 0 <= one.seconds < 60


def test_test_that_fails_twice_fails_the_run(tmp_path):
    (tmp_path / "test_one.py").write_text(BESIDE_OTHERS + ALWAYS)
    done = run_in(tmp_path, "--workers", "3", "--retry-failed", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 4 flaky" in done.stdout.splitlines()[-1]
    assert "failed twice: test_one.py::test_always" in done.stdout.splitlines()
    assert "flaky: test_one.py::test_call" in done.stdout.splitlines()
    assert done.stdout.count("FAILED test_one.py::test_always") == 1
    assert "said in run 1" in done.stdout, "the first failure is printed too"
    assert "said in run 2" in done.stdout
    assert runs_of(tmp_path).count("always") == 2
    assert "test_one.py::test_always" not in {one.test for one in record_of(tmp_path)}


@pytest.mark.parametrize(
    "retry",
    ["os._exit(3)", "os.kill(os.getpid(), 9)", "request.addfinalizer(lambda: 1 / 0)", "pytest.skip('not alone')"],
)
def test_retry_that_does_not_pass_fails_the_run(tmp_path, retry):
    source = "def test_it(request):\n    if run('it') > 1: {}\n    else: assert False, 'said first'\n"
    (tmp_path / "test_one.py").write_text(BESIDE_OTHERS.split("@pytest", maxsplit=1)[0] + source.format(retry))
    done = run_in(tmp_path, "--workers", "1", "--retry-failed", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "said first" in done.stdout
    assert "flaky" not in done.stdout
    assert runs_of(tmp_path).count("it") == 2
    assert record_of(tmp_path) == []


def test_more_failures_than_the_limit_fail_the_run_without_retries(tmp_path):
    (tmp_path / "test_one.py").write_text(BESIDE_OTHERS + ALWAYS)
    done = run_in(tmp_path, "--workers", "3", "--retry-failed", "4")
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert "3 failed, 2 passed, 2 errors" in last
    assert "flaky" not in done.stdout
    ran = runs_of(tmp_path)
    assert (ran.count("call"), ran.count("always"), ran.count("dies")) == (1, 1, 1)


def test_error_of_a_session_fixture_fails_the_run_without_a_retry(tmp_path):
    (tmp_path / "test_one.py").write_text("import pytest\n" + AT_THE_END)
    done = run_in(tmp_path, "--workers", "1", "--retry-failed", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 1 error" in done.stdout.splitlines()[-1]


def test_interrupted_run_retries_nothing_and_prints_all_failures(tmp_path):
    source = BESIDE_OTHERS + "def test_stops():\n    os.kill(os.getppid(), 2)\n    import time; time.sleep(60)\n"
    (tmp_path / "test_one.py").write_text(source)
    done = run_in(tmp_path, "--workers", "1", "--retry-failed", "5")
    assert done.returncode == 2, done.stdout + done.stderr
    assert runs_of(tmp_path).count("call") == 1
    assert "2 failed" in done.stdout
    assert "said beside others" in done.stdout


def test_interrupted_retry_leaves_the_test_failed(tmp_path):
    source = (
        "def test_it():\n    if run('it') > 1:\n        os.kill(os.getppid(), 2)\n        import time; time.sleep(60)\n"
    )
    source = BESIDE_OTHERS.split("@pytest", maxsplit=1)[0] + source + "    assert False, 'said first'\n"
    (tmp_path / "test_one.py").write_text(source)
    done = run_in(tmp_path, "--workers", "1", "--retry-failed", "5")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "said first" in done.stdout


def test_retry_failed_requires_workers(tmp_path):
    done = run_in(tmp_path, "--retry-failed", "5")
    assert done.returncode == 4
    assert "--retry-failed N requires --workers N" in done.stderr


def test_memory_in_huge_pages_is_unchanged():
    bits = os.urandom(32 << 20)
    before = bytes(memoryview(bits)[::-1])
    collapse_private_memory()
    assert bits == before[::-1]
