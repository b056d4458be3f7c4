"""The command reports inputs that cannot be trained before it starts a process."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("transformers.generation")

from elastic.cli.common import ElasticScreen
from elastic.errors import PolicyError
from integration.finetune.finetune_cli import finetune_command, step_text
from integration.finetune.finetune_job import DataError, FinetuneJob, ModelError
from integration.finetune.inputs import open_job_inputs
from tests.support import tiny_models


@pytest.fixture
def folder(tmp_path):
    tiny_models.config_file(tmp_path, "llama")
    tiny_models.tokenizer_folder(tmp_path)
    tiny_models.data_file(tmp_path)
    return tmp_path


def job_in(folder, **changed):
    job = FinetuneJob(
        name="a",
        data=(str(folder / "data.jsonl"),),
        output=str(folder / "out"),
        config=str(folder / "llama.json"),
        tokenizer=str(folder / "tokenizer"),
        batch=4,
        lr=1e-3,
    )
    return msgspec.structs.replace(job, **changed)


def test_job_inputs_are_opened(folder):
    brought = open_job_inputs(job_in(folder))
    assert (len(brought.corpus), brought.length) == (40, 64)
    assert open_job_inputs(job_in(folder, length=8)).length == 8
    assert brought.encoder({"prompt": "w1", "completion": "w2"}, "here").weights.tolist() == [1, 1]


def test_tokens_need_no_tokenizer_and_text_does(folder):
    tokens = folder / "tokens.jsonl"
    tokens.write_text('{"input_ids": [3, 4, 5]}\n')
    assert open_job_inputs(job_in(folder, tokenizer="", data=(str(tokens),))).tokenizer is None
    with pytest.raises(DataError, match="there is no tokenizer: set --tokenizer, or provide input_ids"):
        open_job_inputs(job_in(folder, tokenizer=""))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"length": 65}, "--length is 65, but the model has no more than 64 positions"),
        ({"config": ""}, "say --model FOLDER or NAME, or --config FILE"),
        ({"model": "both"}, "one of the two"),
        ({"config": "none.json"}, "none.json is not a model configuration"),
    ],
)
def test_model_that_does_not_fit_is_reported(folder, changed, named):
    with pytest.raises(ModelError) as caught:
        open_job_inputs(job_in(folder, **changed))
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["[", "{}", '{"model_type": "no-such"}'])
def test_invalid_model_configuration_is_reported(folder, text):
    (folder / "odd.json").write_text(text)
    with pytest.raises(ModelError, match=r"odd\.json is not a model configuration"):
        open_job_inputs(job_in(folder, config=str(folder / "odd.json")))


def test_missing_tokenizer_is_reported(folder, monkeypatch):
    (folder / "empty").mkdir()
    with pytest.raises(ModelError, match=r"--tokenizer .*empty: cannot load a tokenizer"):
        open_job_inputs(job_in(folder, tokenizer=str(folder / "empty")))


def test_the_first_line_of_every_file_is_tried(folder):
    (folder / "zz.jsonl").write_text('{"words": "w1"}\n')
    with pytest.raises(DataError, match=r"zz\.jsonl:1 has words; a line needs text"):
        open_job_inputs(job_in(folder, data=(str(folder / "data.jsonl"), str(folder / "zz.jsonl"))))


def test_command_reports_the_problem_and_starts_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    brought = ["--config", "llama.json", "--data", "data.jsonl", "--output", "out"]
    for words, named in (
        ([], "there is no tokenizer"),
        (["--nodes", "2", "--nproc", "16", "--tokenizer", "tokenizer"], "world_size is 32, but global_batch has 16"),
        (["--nodes", "2:1"], "MIN is at least 1"),
    ):
        result = CliRunner().invoke(
            finetune_command, [*brought, *words], standalone_mode=False, obj=ElasticScreen("elastic")
        )
        assert isinstance(result.exception, PolicyError)
        assert named in str(result.exception)
    assert not (folder / "out").exists()


def test_a_step_for_people():
    line = {"step": 0, "steps": 10, "loss": 1.5, "tokens": 1234, "lr": 1e-5, "ranks": 1, "seconds": 0.5}
    assert step_text(json.loads(json.dumps(line))) == "step 1/10  loss 1.5000  1,234 tokens  lr 1e-05  1 rank  0.50 s"


def test_documented_commands_parse():
    """Every `elastic finetune` of docs/how-to/finetune.md."""
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "finetune.md").read_text()
    lines = re.findall(r"^(?:\$ )?elastic finetune (.*)$", text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        context = finetune_command.make_context("finetune", shlex.split(line))
        assert context.params["data"]
