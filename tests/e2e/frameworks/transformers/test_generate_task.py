"""``elastic map --task generate`` outputs the tokens of the model, with the weights of a step."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "transformers.generation", reason="Transformers is not installed: pip install tieredckpt[transformers]"
)

from transformers import AutoConfig, AutoModelForCausalLM

from elastic.errors import PolicyError
from integration.transformers.generate_task import TextGeneration, load_model_from_step
from tests.support.bits import assert_same_bits
from tests.support.tiny_models import config_file, tokenizer_folder
from tieredckpt import Checkpointer, MismatchError

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:torch.distributed is")]


@pytest.fixture(autouse=True)
def no_progress_thread(monkeypatch):
    """Keep progress bars of Transformers from starting a thread that never ends."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


ROOT = Path(__file__).parents[4]
TOKENS = 12


def build_model(folder, family, seed):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_file(folder, family))).eval()


def prompts(count):
    generator = torch.Generator().manual_seed(0)
    return [
        {"id": number, "input_ids": torch.randint(3, 60, (1 + number % 5,), generator=generator).tolist()}
        for number in range(count)
    ]


def expected_output(model, value):
    """Generate alone, without padding."""
    ids = torch.tensor([value["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    new = out[0, ids.shape[1] :].tolist()
    end = model.generation_config.eos_token_id
    stops = end in new
    return {**value, "finish": "stop" if stops else "length", "output_ids": new[: new.index(end)] if stops else new}


def run_map(folder, *words):
    """Run the command with the entry points of this tree, which may not be those of the installed package."""
    entries = re.search(
        r'\[project.entry-points."elastic.map_tasks"\]\n(.*?)\n\n', (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    info = folder / "site" / "map_tasks_of_test-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: map-tasks-of-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[elastic.map_tasks]\n" + entries[1].replace('"', "") + "\n")
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    command = [sys.executable, "-m", "elastic", "map", *map(str, words)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stderr


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2 has tied weights
def test_weights_of_a_step_are_loaded_bitwise_without_the_optimizer(tmp_path, agent_dir, family):
    model = build_model(tmp_path, family, seed=3)
    with Checkpointer(f"tiered://generate-{family}") as checkpointer:
        checkpointer.save({"model": model, "optim": torch.optim.AdamW(model.parameters())}, 4).wait()
    torch.manual_seed(99)
    loaded = load_model_from_step(f"tiered://generate-{family}", str(tmp_path / f"{family}.json"))
    assert_same_bits(loaded.state_dict(), model.state_dict())


def test_step_of_another_model_is_an_error(tmp_path, agent_dir):
    with Checkpointer("tiered://generate-other") as checkpointer:
        checkpointer.save({"model": torch.nn.Linear(2, 2)}, 0).wait()
    config_file(tmp_path, "llama")
    with pytest.raises(MismatchError, match=r"no weight 'model\.embed_tokens\.weight'"):
        load_model_from_step("tiered://generate-other", str(tmp_path / "llama.json"))
    with pytest.raises(PolicyError, match="config=FOLDER"):
        TextGeneration("tiered://generate-other")


def test_map_generates_from_the_newest_step_and_keeps_to_it(tmp_path, agent_dir):
    old, new = (build_model(tmp_path, "llama", seed) for seed in (1, 2))
    values = prompts(10)
    source = write_lines(tmp_path / "prompts.jsonl", values)
    output = tmp_path / "out.jsonl"
    words = ["--task", "generate", "--model", "tiered://generate-map", "--option", f"config={tmp_path / 'llama.json'}"]
    words += [
        "--option",
        f"max_new_tokens={TOKENS}",
        "--option",
        "do_sample=false",
        "--batch-size",
        4,
        "--chunk-size",
        4,
    ]
    with Checkpointer("tiered://generate-map") as checkpointer:
        checkpointer.save({"model": old}, 1).wait()
        code, err = run_map(tmp_path, *words, source, output)
        assert code == 0, err
        assert "loaded step 1 of tiered://generate-map/step-1" in err
        assert read_lines(output) == [expected_output(old, value) for value in values]
        assert json.loads((tmp_path / "out.jsonl.work/plan.json").read_text())["resolved"]["model"].endswith("/step-1")
        checkpointer.save({"model": new}, 2).wait()
        # A job that began with step 1 resumes with step 1, and a new job would use step 2.
        (tmp_path / "out.jsonl.work/result.json").unlink()
        output.unlink()
        code, err = run_map(tmp_path, *words, source, output)
        assert code == 0, err
        assert read_lines(output) == [expected_output(old, value) for value in values]
        resolved = TextGeneration.resolve_options({"model": "tiered://generate-map", "config": "c"})
    assert resolved == {"model": "tiered://generate-map/step-2", "config": "c"}


def test_prompts_of_words_and_bad_inputs(tmp_path):
    model = build_model(tmp_path, "llama", seed=1)
    model.save_pretrained(tmp_path / "model")
    task = TextGeneration(
        str(tmp_path / "model"),
        tokenizer=str(tokenizer_folder(tmp_path)),
        max_new_tokens=5,
        do_sample=False,
        device="cpu",
    )
    (output,) = task([{"prompt": "w1 w2 w3", "id": 7}])
    tokens = expected = task.tokenizer("w1 w2 w3")["input_ids"]
    expected = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=5)[0, len(tokens) :]
    assert output["completion"] == task.tokenizer.decode(expected, skip_special_tokens=True)
    assert output["id"] == 7
    assert task({"prompt": "w1 w2 w3", "id": 7}) == output
    for value in ({}, 3, {"input_ids": []}, {"input_ids": [64]}, {"input_ids": ["a"]}):
        with pytest.raises(ValueError, match="must"):
            task(value)


def test_lz_penalty_changes_a_repetition(tmp_path):
    model = build_model(tmp_path, "llama", seed=1)
    model.save_pretrained(tmp_path / "model")
    outputs = [
        TextGeneration(str(tmp_path / "model"), max_new_tokens=100, do_sample=False, device="cpu", lz_penalty=strength)(
            {"input_ids": [5, 6, 7] * 6}
        )["output_ids"]
        for strength in (0.0, 50.0)
    ]
    assert outputs[0] != outputs[1]
    assert len(set(outputs[1])) > len(set(outputs[0]))
