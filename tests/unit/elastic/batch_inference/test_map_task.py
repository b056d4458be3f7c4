"""Every input becomes exactly one line: an output, or its error."""

import json

import pytest

from elastic.batch_inference.chunk_plan import InputLine
from elastic.batch_inference.map_task import MapTask, load_function
from elastic.errors import PolicyError

MODULE = """
import helper_of_map_test

def double(value, factor=2):
    return {"value": value["value"] * factor}

class Adder:
    def __init__(self, amount):
        self.amount = amount
    def __call__(self, value):
        return value + self.amount

class NotCallable:
    pass

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "helper_of_map_test.py").write_text("")
    file = tmp_path / "functions_of_map_test.py"
    file.write_text(MODULE)
    return str(file)


def inputs(*texts):
    return [InputLine(number, text.encode()) for number, text in enumerate(texts, 1)]


def results(task, *texts):
    return [(line[:1], json.loads(line[1:])) for line in task.lines_for(inputs(*texts))]


def test_function_of_a_file_and_of_a_module(module):
    assert load_function(f"{module}:double", {})({"value": 4}) == {"value": 8}
    assert load_function(f"{module}:double", {"factor": 3})({"value": 4}) == {"value": 12}
    assert load_function(f"{module}:Adder", {"amount": 1})(2) == 3
    assert load_function("json:JSONDecoder.decode", {}) is json.JSONDecoder.decode


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MODULE:absent", "has no absent"),
        ("MODULE:number", "it is a int, not a function"),
        ("MODULE:NotCallable", "no __call__"),
        ("absent.py:f", "no such file"),
        ("absent_module:f", "no such module"),
        ("absent-task", "write module:name or file.py:name"),
    ],
)
def test_unknown_function_is_a_usage_error(module, name, message):
    with pytest.raises(PolicyError, match=message):
        load_function(name.replace("MODULE", module), {})


def test_input_is_retried():
    calls = []

    def fails_twice(value):
        calls.append(dict(value))
        value["changed"] = True
        if len(calls) < 3:
            raise ValueError(f"call {len(calls)}")
        return "done"

    assert results(MapTask(fails_twice, takes_lists=False, retries=2), "{}") == [(b"0", "done")]
    assert calls == [{}, {}, {}]  # a retry receives the input of the file


def test_failed_input_becomes_a_line_with_its_error():
    def fails(value):
        raise ValueError("no")

    ((mark, record),) = results(MapTask(fails, takes_lists=False, retries=1), '{"a": 1}')
    assert mark == b"1"
    assert record == {"error": {"type": "ValueError", "message": "no", "attempts": 2}, "line": 1, "input": {"a": 1}}


@pytest.mark.parametrize("text", ["{", "\udcff", "nul"])
def test_input_without_json_fails_without_a_call(text):
    task = MapTask(pytest.fail, takes_lists=False, retries=2)
    (line,) = task.lines_for([InputLine(1, text.encode(errors="surrogateescape"))])
    record = json.loads(line[1:])
    assert line[:1] == b"1"
    assert record["error"]["attempts"] == 0
    assert record["input"] == text.encode(errors="surrogateescape").decode(errors="replace")


@pytest.mark.parametrize("output", [float("nan"), {1, 2}, "\ud800"])
def test_output_outside_of_json_is_an_error(output):
    ((mark, record),) = results(MapTask(lambda _: output, takes_lists=False, retries=0), "1")
    assert mark == b"1"
    assert record["input"] == 1


def test_batch_is_one_call(capsys):
    sizes = []

    def negate(values):
        sizes.append(len(values))
        return [-value for value in values]

    task = MapTask(negate, takes_lists=True, retries=0)
    assert results(task, "1", "2", "3") == [(b"0", -1), (b"0", -2), (b"0", -3)]
    assert sizes == [3]
    assert capsys.readouterr().err == ""


def test_failed_batch_costs_only_its_bad_inputs(capsys):
    def invert(values):
        return [1 / value for value in values]

    marks = [mark for mark, _ in results(MapTask(invert, takes_lists=True, retries=0), "1", "0", "{", "2")]
    assert marks == [b"0", b"1", b"1", b"0"]
    assert "a batch of 4 inputs from line 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(("output", "found"), [([], "0 results"), ("ab", "returned str"), (None, "NoneType")])
def test_batch_function_with_wrong_results_is_an_error(output, found):
    ((mark, record),) = results(MapTask(lambda _: output, takes_lists=True, retries=0), "1")
    assert mark == b"1"
    assert found in record["error"]["message"]
