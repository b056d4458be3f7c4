"""Runs like those of the ``Trainer``, with TRL's ``SFTTrainer`` and the mixin class."""

from __future__ import annotations

from typing import Any

import datasets
from trl import SFTConfig, SFTTrainer

from integration.transformers import TieredTrainerMixin
from tests.support.transformers_training import SAMPLES, URL, Events, NumberedLines, default_arguments, make_model


class TieredSFTTrainer(TieredTrainerMixin, SFTTrainer):
    """Trainer for supervised fine-tuning with tiered checkpoints."""


def sft_trainer(folder: str, arguments: dict[str, Any], options: dict[str, Any], events: Events) -> Any:
    lines = NumberedLines()
    rows = {"input_ids": [lines[number]["input_ids"].tolist() for number in range(SAMPLES)]}
    return TieredSFTTrainer(
        make_model(pad_token_id=0),
        SFTConfig(folder, **default_arguments(**arguments)),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=make_tokenizer(),
        callbacks=[events],
        tiered={"url": URL, **options},
    )


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
