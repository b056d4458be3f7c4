"""Adapters change no output at first, are the only trained weights, and merge into the model."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers.generation")

from integration.finetune.finetune_job import FinetuneJob
from integration.finetune.model import LoRALinear, add_lora, initial_lora_weights, merge_lora
from tests.support.tiny_models import CONFIGS, config_file

pytestmark = pytest.mark.slow

JOB = FinetuneJob(name="a", data=(), output="o", lora=4, lora_alpha=8.0, seed=1)


def model_of(tmp_path, family):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**json.loads(config_file(tmp_path, family).read_text()))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", CONFIGS)
def test_merged_adapters_match_a_plain_model(tmp_path, family):
    plain, beside = model_of(tmp_path, family), model_of(tmp_path, family)
    add_lora(beside, JOB)
    names = set(beside.state_dict())
    beside.load_state_dict(initial_lora_weights(plain.state_dict(), names, JOB))
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        assert torch.equal(beside(input_ids=ids).logits, before)
        for one in beside.modules():
            if isinstance(one, LoRALinear):
                one.adapter_b.normal_(std=0.05)
        changed = beside(input_ids=ids).logits
        plain.load_state_dict(merge_lora(beside.state_dict(), JOB))
        assert not torch.allclose(changed, before, atol=1e-4)
        torch.testing.assert_close(plain(input_ids=ids).logits, changed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_only_adapters_are_trained_and_the_last_layer_has_none(tmp_path, family):
    model = model_of(tmp_path, family)
    add_lora(model, JOB)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    assert all(name.endswith((".adapter_a", ".adapter_b")) for name in trained)
    assert not any(name.startswith("lm_head") for name in trained)


def test_initial_adapter_weights_follow_the_seed(tmp_path):
    model = model_of(tmp_path, "llama")
    weights = dict(model.state_dict())
    add_lora(model, JOB)
    one, same = (initial_lora_weights(weights, set(model.state_dict()), JOB) for _ in range(2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert one.keys() == model.state_dict().keys()
