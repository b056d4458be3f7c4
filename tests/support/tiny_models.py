"""Minimal models of every family, with a tokenizer of a few words and training lines."""

from __future__ import annotations

import json
import random
from pathlib import Path

_WORDS = [f"w{number}" for number in range(56)]
VOCABULARY = 64
_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
}


def config_file(folder: Path, family: str) -> Path:
    path = folder / f"{family}.json"
    path.write_text(json.dumps(_SHARED | CONFIGS[family]))
    return path


def tokenizer_folder(folder: Path) -> Path:
    """Write a tokenizer that maps each word to a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *_WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def data_file(folder: Path, lines: int = 40) -> Path:
    """Write training lines of all kinds and various lengths."""
    chance = random.Random(5)

    def words(most: int) -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, most)))

    path = folder / "data.jsonl"
    with path.open("w") as file:
        for number in range(lines):
            kinds = [
                {"text": words(20)},
                {"prompt": words(8), "completion": words(12)},
                {"input_ids": chance.choices(range(3, 60), k=12), "weights": chance.choices([0, 0.5, 1], k=12)},
            ]
            file.write(json.dumps(kinds[number % 3]) + "\n")
    return path
