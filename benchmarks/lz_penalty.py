"""Repetition, frequency and LZ penalty on a small model that repeats itself, with their costs.

    python -m benchmarks.lz_penalty [--json]

A model of two layers learns cyclic sequences of different periods, so greedy generation continues a cycle forever. The
``repeated`` share counts the new tokens whose last eight tokens occurred before in the new text. ``common`` is the
accuracy of a second task, in which the correct token after each separator is very frequent: a penalty should not change
it. ``overhead`` compares the penalty's time with a forward pass of a larger model with random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from integration.transformers import LZPenalty

VOCABULARY, LENGTH, PERIODS, NEW_TOKENS = 64, 64, (3, 9), 160
SEPARATOR = 1
COMMON = 2
LARGE = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}


class FrequencyPenalty(LogitsProcessor):
    """Lower the score of each token in proportion to its number of occurrences."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.strength * counts


PENALTIES: dict[str, Callable[[], LogitsProcessor | None]] = {
    "none": lambda: None,
    "repetition 1.2": lambda: RepetitionPenaltyLogitsProcessor(1.2),
    "repetition 2.0": lambda: RepetitionPenaltyLogitsProcessor(2.0),
    "frequency 0.3": lambda: FrequencyPenalty(0.3),
    "frequency 1.0": lambda: FrequencyPenalty(1.0),
    "LZ 0.15": lambda: LZPenalty(0.15),
    "LZ 1.0": lambda: LZPenalty(1.0),
    "LZ 4.0": lambda: LZPenalty(4.0),
}


def cycles(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return sequences that repeat random tokens with random periods."""
    rows = []
    for period in torch.randint(*PERIODS, (count,), generator=generator).tolist():
        tokens = torch.randint(3, VOCABULARY, (period,), generator=generator)
        rows.append(tokens.repeat(LENGTH // period + 1)[:LENGTH])
    return torch.stack(rows)


def separated(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return sequences of random tokens, each followed by a separator and the common token."""
    rows = torch.full((count, LENGTH), COMMON)
    rows[:, 0::3] = torch.randint(3, VOCABULARY, rows[:, 0::3].shape, generator=generator)
    rows[:, 1::3] = SEPARATOR
    return rows


def trained_model(steps: int) -> Any:
    """Return a model that has learned both kinds of sequences."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.cat([cycles(12, generator), separated(4, generator)])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def repeated_share(model: Any, penalty: LogitsProcessor | None) -> float:
    """Return the share of new tokens that end eight tokens which occurred before in the new text."""
    prompts = cycles(16, torch.Generator().manual_seed(2))[:, :32]
    processors = LogitsProcessorList([] if penalty is None else [penalty])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    found = model.generate(prompts, attention_mask=torch.ones_like(prompts), logits_processor=processors, **options)
    repeated = total = 0
    for row in found[:, prompts.shape[1] :].tolist():
        seen: set[tuple[int, ...]] = set()
        for end in range(8, len(row) + 1):
            gram = tuple(row[end - 8 : end])
            repeated += gram in seen
            total += 1
            seen.add(gram)
    return repeated / total


@torch.inference_mode()
def common_accuracy(model: Any, penalty: LogitsProcessor | None) -> float:
    """Return how often the token after a separator stays correct under the penalty."""
    rows = separated(16, torch.Generator().manual_seed(3))
    logits = model(rows).logits
    hits = []
    for position in range(1, LENGTH - 1, 3):
        scores = logits[:, position]
        chosen = scores if penalty is None else penalty(rows[:, : position + 1], scores)
        hits.append((chosen.argmax(1) == COMMON).float().mean().item())
    return statistics.mean(hits)


@torch.inference_mode()
def overhead(penalty: LogitsProcessor, model: Any, *, batch: int, context: int, rounds: int = 30) -> float:
    """Return the median time of the penalty as a share of the median time of one decoding step."""
    tokens = torch.randint(0, LARGE["vocab_size"], (batch, context))
    cache = model(tokens, use_cache=True).past_key_values
    step_s, penalty_s = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        scores = model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
        middle = time.perf_counter()
        penalty(tokens, scores)
        step_s.append(middle - began)
        penalty_s.append(time.perf_counter() - middle)
    return statistics.median(penalty_s) / statistics.median(step_s)


def measure(steps: int) -> list[dict[str, Any]]:
    """Return a row for each penalty."""
    model = trained_model(steps)
    large = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, **LARGE)).eval()
    rows = []
    for name, make in PENALTIES.items():
        row = {"penalty": name, "repeated": repeated_share(model, make()), "common": common_accuracy(model, make())}
        if (penalty := make()) is not None:
            row["overhead"] = overhead(penalty, large, batch=4, context=512)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="Training steps of the small model.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    arguments = parser.parse_args()
    rows = measure(arguments.steps)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'penalty':16}{'repeated':>10}{'common':>10}{'overhead':>10}")
    for row in rows:
        cost = f"{row['overhead']:.2%}" if "overhead" in row else ""
        print(f"{row['penalty']:16}{row['repeated']:>10.1%}{row['common']:>10.1%}{cost:>10}")


if __name__ == "__main__":
    main()
