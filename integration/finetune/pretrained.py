"""What Transformers says of a model before there is one: configuration, tokenizer, lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from integration.finetune.corpus import Corpus, open_corpus
from integration.finetune.encoding import Encoder
from integration.finetune.errors import ModelError
from integration.finetune.job import Job

_LONGEST = 4096


class Prepared(NamedTuple):
    """Everything a job brings, opened and tried."""

    config: Any
    tokenizer: Any
    corpus: Corpus
    encoder: Encoder
    length: int


def prepared(job: Job) -> Prepared:
    """What is wrong with model, tokenizer or data is found here, before anything is started; not every line is read."""
    corpus = open_corpus(job.data)
    config = config_of(job)
    tokenizer = tokenizer_of(job)
    length = length_of(job, config)
    encoder = Encoder(tokenizer, length, vocabulary_of(config), job.too_long)
    for index in corpus.firsts():
        encoder(corpus[index], corpus.where(index))
    return Prepared(config, tokenizer, corpus, encoder, length)


def config_of(job: Job) -> Any:
    """Of the model, or from a file of its own."""
    from transformers import AutoConfig

    if bool(job.model) == bool(job.config):
        raise ModelError("say --model FOLDER or NAME, or --config FILE to begin with random weights; one of the two")
    try:
        if job.model:
            return AutoConfig.from_pretrained(job.model)
        tree = json.loads(Path(job.config).read_text(encoding="utf-8"))
        return AutoConfig.for_model(**tree)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{job.model or job.config} is no configuration of a model: {first_line(error)}") from error


def length_of(job: Job, config: Any) -> int:
    """Tokens of a sample at the most."""
    text = config.get_text_config()
    can = getattr(text, "max_position_embeddings", None) or _LONGEST
    if job.length is not None and job.length > can:
        raise ModelError(f"--length is {job.length}, but the model has no more than {can} positions")
    return job.length or min(can, _LONGEST)


def vocabulary_of(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def tokenizer_of(job: Job) -> Any:
    """``None`` where nobody said one: then lines have to be tokens."""
    from transformers import AutoTokenizer

    place = job.tokenizer or job.model
    if not place:
        return None
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if job.tokenizer:
            raise ModelError(f"--tokenizer {place}: there is none: {first_line(error)}") from error
        return None  # lines of tokens need none, others will say so


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
