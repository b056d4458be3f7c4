"""Text generation: the task ``generate`` of ``elastic map``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from elastic.errors import PolicyError
from integration.transformers.lz_penalty import LZPenalty
from tieredckpt import TieredReader
from tieredckpt.dcp.rank_group import unwrap_load_error
from tieredckpt.errors import MismatchError
from tieredckpt.tensors.device import accelerator

_SCHEME = "tiered://"


class TextGeneration:
    """A causal language model that completes the prompts of its inputs.

    ``model`` is a folder or a name that Transformers can load, or ``tiered://JOB`` with ``config``, the folder or name
    of the model's configuration. ``tokenizer`` is the model's or that of ``config`` by default. ``lz_penalty`` is the
    strength of :class:`LZPenalty`. All other options are passed to ``generate``.

    An input is an object with ``prompt``, a text, or ``input_ids``, a list of token numbers, or ``messages`` for a chat
    model. The output is the input with ``completion``, or with ``output_ids`` for ``input_ids``. Its ``finish`` is
    ``stop`` or ``length``.
    """

    def __init__(
        self,
        model: str,
        *,
        config: str | None = None,
        tokenizer: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        lz_penalty: float = 0.0,
        **options: Any,
    ) -> None:
        self.device = torch.device(device) if device else _default_device()
        if model.startswith(_SCHEME):
            if config is None:
                raise PolicyError(f"Cannot generate with {model}: pass --option config=FOLDER.")
            self.model = load_model_from_step(model, config, dtype)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model.to(self.device).eval()
        self._tokenizer_name = tokenizer or config or model
        self._tokenizer: Any = None
        generation = self.model.generation_config
        ends = options.pop("eos_token_id", generation.eos_token_id)
        self._ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        pad = options.pop("pad_token_id", generation.pad_token_id)
        self._pad = next((token for token in (pad, *self._ends) if token is not None), 0)
        self._options = options | {"pad_token_id": self._pad, "eos_token_id": self._ends or None}
        self._lz_penalty = lz_penalty

    @classmethod
    def resolve_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with the newest step of the job, so that all nodes of a job use the same weights."""
        model = str(options.get("model", ""))
        if not model.startswith(_SCHEME) or "/step-" in model:
            return dict(options)
        reader = TieredReader(model)
        with closing(reader):
            reader.read_metadata()
        return {**options, "model": f"{model.rstrip('/')}/step-{reader.chosen_step}"}

    def __call__(self, inputs: Any) -> Any:
        """Complete an input, or each input of a list in one batch."""
        if not isinstance(inputs, list):
            return self._complete([inputs])[0]
        return self._complete(inputs)

    @torch.inference_mode()
    def _complete(self, inputs: list[Any]) -> list[dict[str, Any]]:
        prompts = [self._tokens(value) for value in inputs]
        width = max(len(tokens) for tokens in prompts)
        # Prompts end in the same column, where the new tokens begin.
        padded = [[self._pad] * (width - len(tokens)) + tokens for tokens in prompts]
        mask = [[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in prompts]
        attention = torch.tensor(mask, device=self.device)
        options = dict(self._options)
        if self._lz_penalty:
            starts = [width - len(tokens) for tokens in prompts]
            options["logits_processor"] = LogitsProcessorList([LZPenalty(self._lz_penalty, starts=starts)])
        ids = torch.tensor(padded, device=self.device)
        found = self.model.generate(input_ids=ids, attention_mask=attention, **options)
        if len(found) != len(inputs):
            raise PolicyError("num_return_sequences must be 1: each input has one output")
        return [self._output(*pair) for pair in zip(inputs, found[:, width:].tolist(), strict=True)]

    def _tokens(self, value: Any) -> list[int]:
        if not isinstance(value, dict) or not value.keys() & {"prompt", "input_ids", "messages"}:
            raise ValueError("an input must be an object with prompt, input_ids or messages")
        if "input_ids" in value:
            tokens = value["input_ids"]
        elif "prompt" in value:
            tokens = self.tokenizer(value["prompt"])["input_ids"]
        else:
            text = self.tokenizer.apply_chat_template(value["messages"], add_generation_prompt=True, tokenize=False)
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        size = self.model.get_input_embeddings().num_embeddings
        if not tokens or not all(isinstance(token, int) and 0 <= token < size for token in tokens):
            raise ValueError(f"the prompt must have at least one token, and all tokens must be below {size}")
        return list(tokens)

    def _output(self, value: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        end = next((number for number, token in enumerate(tokens) if token in self._ends), None)
        new = tokens[:end]
        result = {**value, "finish": "length" if end is None else "stop"}
        if "input_ids" in value:
            return {**result, "output_ids": new}
        return {**result, "completion": self.tokenizer.decode(new, skip_special_tokens=True)}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded on first use: inputs with ``input_ids`` need none."""
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_name)
        return self._tokenizer


def load_model_from_step(url: str, config: str, dtype: str = "auto") -> Any:
    """Return the model of a step, with its weights from the fastest tier that has them.

    Optimizer and other entries of the step are not read. Raises :class:`MismatchError` if weights of the model are
    missing in the step, or the errors of a load.
    """
    settings = AutoConfig.from_pretrained(config)
    factory: Any = AutoModelForCausalLM
    model: Any = factory.from_config(settings, **({} if dtype == "auto" else {"dtype": dtype}))
    reader = TieredReader(url)
    reader.resumes_job = False  # training does not continue from this load
    with closing(reader):
        names = weight_names(model, reader.read_metadata().state_dict_metadata)
        weights = model.state_dict()
        try:
            dcp.load({saved: weights[name] for name, saved in names.items()}, storage_reader=reader, no_dist=True)
        except CheckpointException as failure:
            raise unwrap_load_error(failure) from failure
    model.tie_weights()
    print(f"loaded step {reader.chosen_step} of {url}", file=sys.stderr)
    return model


def weight_names(model: Any, saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the saved name of each weight.

    It is the weight's own name after a prefix that all weights share, such as ``model.``. A tied weight may
    be saved under one of its names. Raises :class:`MismatchError` if a weight is missing.
    """
    weights = model.state_dict()
    first = next(iter(weights))
    prefixes = sorted((name.removesuffix(first) for name in saved if name.endswith(first)), key=len)
    missing: list[str] = []
    for prefix in prefixes:
        found = {name: prefix + name for name in weights if prefix + name in saved}
        present = {weights[name].data_ptr() for name in found}
        lost = [name for name in weights if name not in found and weights[name].data_ptr() not in present]
        if not lost:
            return found
        missing = missing or lost
    raise MismatchError(f"Cannot load the model: the step has no weight {(missing or [first])[0]!r}.")


def _default_device() -> torch.device:
    return accelerator().current() if accelerator().device_count() else torch.device("cpu")
