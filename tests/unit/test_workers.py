"""The tests of a run, shared by forked workers: each runs once, and nothing that goes wrong is lost."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.workers import TIMED, Pace, Queue, Unit, units_of

FILES = st.sampled_from(["tests/unit/a.py", "tests/unit/b.py", "tests/e2e/c.py", TIMED[0] + "d.py", TIMED[-1] + "e.py"])
TESTS = st.lists(st.tuples(FILES, st.booleans()), max_size=30)


@given(TESTS, st.dictionaries(FILES, st.floats(0, 100)))
def test_every_test_is_in_one_unit_and_what_belongs_together_in_the_same(tests, seconds):
    units = units_of(tests, seconds)
    assert sorted(position for unit in units for position in unit.tests) == [*range(len(tests))]
    for unit in units:
        (file,) = {tests[position][0] for position in unit.tests}
        assert unit.timed is file.startswith(TIMED)
        whole = [position for position, (other, _) in enumerate(tests) if other == file]
        together = any(stays for other, stays in tests if other == file)
        assert list(unit.tests) == whole if together else len(unit.tests) == 1


def test_the_longest_begin_first():
    tests = [("tests/unit/quick.py", True), ("tests/unit/slow.py", True), ("tests/e2e/unknown.py", True)]
    first, *_, last = units_of(tests, {"tests/unit/quick.py": 1.0, "tests/unit/slow.py": 100.0})
    assert (first.tests, last.tests) == ((1,), (0,))


@given(TESTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_all_are_run_and_timed_ones_one_at_a_time(tests, at_once, random):
    queue, running, ran = Queue(units_of(tests, {})), [], []
    while queue or running:
        while len(running) < at_once and (unit := queue.next()) is not None:
            running.append(unit)
            assert sum(one.timed for one in running) <= 1
        assert running, "nothing may begin and nothing is running"
        assert queue.running == len(running)
        done = running.pop(random.randrange(len(running)))
        queue.done(done)
        ran += done.tests
    assert sorted(ran) == [*range(len(tests))]


def test_tests_that_wait_make_room_for_others_and_tests_that_compute_do_not():
    pace = Pace(least=3, most=6, now=3)
    for _ in range(5):
        pace.hear(0.2, running=pace.now)
    assert pace.now == 6
    pace.hear(0.9, running=6)
    assert pace.now == 6, "as it should be"
    for _ in range(5):
        pace.hear(1.0, running=6)
    assert pace.now == 3
    pace.hear(0.2, running=2)
    assert pace.now == 3, "that others wait was not for want of room"


def test_the_rest_of_a_unit_whose_worker_died_comes_next():
    queue = Queue([Unit((0, 1, 2), 1.0), Unit((3,), 1.0)])
    died = queue.next()
    queue.done(died)
    queue.again(Unit((2,), 1.0))
    queue.again(Unit((), 1.0))
    assert [queue.next().tests for _ in range(2)] == [(2,), (3,)]


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


def test_failures_a_dead_worker_and_what_a_session_s_end_raises_are_told(tmp_path):
    (tmp_path / "test_one.py").write_text(OUTCOMES)
    (tmp_path / "test_two.py").write_text("def test_other(): pass\ndef test_end(bad_end): pass\n")
    (tmp_path / "conftest.py").write_text(OUTCOMES.split('@pytest.fixture(scope="module")', maxsplit=1)[0])
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "tests.support.workers",
         "-p", "no:cacheprovider", "-rA", "--workers", "2", str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "its worker ended with status 7" in done.stdout
    assert "the session's fixture did not end" in done.stdout
    told = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("PASSED ", "FAILED ", "ERROR "))]
    assert sorted((name.split("::")[1], how) for how, name in told) == [
        ("test_after_it", "PASSED"), ("test_dies", "FAILED"), ("test_end", "ERROR"), ("test_end", "PASSED"),
        ("test_good", "PASSED"), ("test_other", "PASSED"), ("test_same_process", "PASSED"), ("test_wrong", "FAILED"),
    ]  # fmt: skip
    assert "2 failed, 5 passed, 1 skipped, 1 error" in done.stdout
