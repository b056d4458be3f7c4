"""A job's inputs: JSON lines, tokens and weights of a line, model configuration, tokenizer. No torch.

::

    {"text": ...}                                       every token counts
    {"prompt": ..., "completion": ...}                  tokens of the completion and the end token count
    {"input_ids": [...], "labels": [...]}               labels of -100 do not count; without labels, all count
    {"input_ids": [...], "weights": [...]}              each token counts by its weight
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from integration.finetune.finetune_job import FINETUNE_EXTRA, DataError, FinetuneJob, ModelError
from peerstore.optional_packages import optional_imports

_ENDINGS = (".jsonl", ".json", ".ndjson")
_BUFFER_BYTES = 1 << 24


class _File(NamedTuple):
    path: str
    starts: np.ndarray
    """Positions of the lines that are not blank, followed by the size of the file."""
    numbers: np.ndarray
    """Line numbers in the file, from 1."""


class JsonLinesCorpus:
    """All samples of some files, in the order of the files and their lines. Can be pickled."""

    def __init__(self, files: Iterable[Path]) -> None:
        digest = xxhash.xxh3_128()
        self._files = [_scan_file(path, digest) for path in files]
        self._ends = np.cumsum([len(file.numbers) for file in self._files])
        self.digest = digest.hexdigest()
        """Digest of all bytes."""
        if not len(self):
            raise DataError(f"there is not a single line in {', '.join(file.path for file in self._files)}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return the line's object. Raise :class:`DataError` with the position if it is invalid."""
        file, place = self._find(index)
        start, end = int(file.starts[place]), int(file.starts[place + 1])
        with Path(file.path).open("rb") as opened:
            opened.seek(start)
            line = opened.read(end - start)
        try:
            found = json.loads(line.split(b"\n", 1)[0])
        except ValueError as error:
            raise DataError(f"{self.location_of(index)} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f'{self.location_of(index)} is not an object: write {{"text": ...}}, a line per sample')
        return found

    def location_of(self, index: int) -> str:
        """Return the position of a sample, like ``data.jsonl:12``, for messages."""
        file, place = self._find(index)
        return f"{file.path}:{int(file.numbers[place])}"

    def first_index_of_files(self) -> list[int]:
        """Return the first sample of each file."""
        return [int(end) - len(file.numbers) for file, end in zip(self._files, self._ends, strict=True)]

    def _find(self, index: int) -> tuple[_File, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[which]
        return file, index - int(self._ends[which]) + len(file.numbers)


def open_corpus(places: Iterable[str]) -> JsonLinesCorpus:
    """Open files, and all files of JSON lines in folders."""
    files: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.rglob("*") if path.suffix in _ENDINGS and path.is_file())
            if not inside:
                raise DataError(f"folder {place} has no file of JSON lines ({', '.join(_ENDINGS)})")
            files += inside
        elif place.is_file():
            files.append(place)
        else:
            raise DataError(f"there is no file or folder {place}")
    if not files:
        raise DataError("say where the data is: --data FILE or FOLDER")
    return JsonLinesCorpus(files)


def _scan_file(path: Path, digest: Any) -> _File:
    starts: list[int] = []
    numbers: list[int] = []
    at = 0
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as opened:
            for number, line in enumerate(opened, start=1):
                digest.update(line)
                if line.strip():
                    starts.append(at)
                    numbers.append(number)
                at += len(line)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    # A blank line after a sample is read with it and has no effect.
    return _File(str(path), np.array([*starts, at], np.int64), np.array(numbers, np.int64))


IGNORE_INDEX = -100
"""Label without a prediction, as in Transformers."""
_KINDS = "text; prompt and completion; or input_ids, with labels or weights"


class EncodedSample(NamedTuple):
    """One sample. All three arrays have the same length."""

    ids: np.ndarray
    targets: np.ndarray
    """The next token of each token."""
    weights: np.ndarray
    """Weight of each prediction; 0 if it does not count."""


class SampleEncoder:
    """A tokenizer with the maximum length of a sample. Encoding is deterministic."""

    def __init__(self, tokenizer: Any, length: int, vocabulary: int, too_long: Literal["cut", "error"] = "cut") -> None:
        self._tokenizer = tokenizer
        self._length = length
        self._vocabulary = vocabulary
        self._too_long = too_long

    def __call__(self, line: Mapping[str, Any], where: str) -> EncodedSample:
        tokens, labels, weights = self._tokens(line, where)
        if len(tokens) > self._length + 1:
            if self._too_long == "error":
                raise DataError(
                    f"{where} has {len(tokens)} tokens, --length is {self._length}: cut it, leave it out, or say "
                    "--too-long cut"
                )
            end = self._length + 1
            tokens, labels, weights = tokens[:end], labels[:end], weights[:end]
        ids = np.asarray(tokens[:-1] or tokens or [0], np.int32)
        if len(tokens) < 2:  # no token follows
            return EncodedSample(ids, np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32))
        targets, counted = np.asarray(labels[1:], np.int32), np.asarray(weights[1:], np.float32)
        counted[targets == IGNORE_INDEX] = 0
        targets[targets == IGNORE_INDEX] = 0
        return EncodedSample(ids, targets, counted)

    def _tokens(self, line: Mapping[str, Any], where: str) -> tuple[list[int], list[int], list[float]]:
        if "input_ids" in line:
            return self._token_line(line, where)
        if "prompt" in line or "completion" in line:
            prompt = self._encode_text(line, "prompt", where, begins=True)
            rest = self._encode_text(line, "completion", where, begins=False) + self._end()
            weights = [0.0] * len(prompt) + [1.0] * len(rest)
            return prompt + rest, prompt + rest, weights
        if "text" in line:
            tokens = self._encode_text(line, "text", where, begins=True) + self._end()
            return tokens, tokens, [1.0] * len(tokens)
        raise DataError(f"{where} has {', '.join(sorted(map(str, line))) or 'nothing'}; a line needs {_KINDS}")

    def _token_line(self, line: Mapping[str, Any], where: str) -> tuple[list[int], list[int], list[float]]:
        tokens = line["input_ids"]
        labels, weights = line.get("labels", tokens), line.get("weights")
        if not _all(tokens, int) or not _all(labels, int) or not (weights is None or _all(weights, (int, float))):
            raise DataError(f"{where}: input_ids, labels and weights are lists of numbers")
        weights = [1.0] * len(tokens) if weights is None else weights
        if not len(tokens) == len(labels) == len(weights):
            raise DataError(
                f"{where}: {len(tokens)} input_ids, {len(labels)} labels, {len(weights)} weights: as many of each"
            )
        beyond = [one for one in (*tokens, *labels) if not 0 <= one < self._vocabulary and one != IGNORE_INDEX]
        if beyond or IGNORE_INDEX in tokens:
            raise DataError(f"{where}: token {(beyond or [IGNORE_INDEX])[0]}, but the model has {self._vocabulary}")
        if any(not 0 <= one < float("inf") for one in weights):
            raise DataError(f"{where}: a weight is 0 or more")
        return list(tokens), list(labels), [float(one) for one in weights]

    def _encode_text(self, line: Mapping[str, Any], name: str, where: str, *, begins: bool) -> list[int]:
        text = line.get(name)
        if not isinstance(text, str):
            raise DataError(f"{where}: {name} is {text!r}: it must be text")
        if self._tokenizer is None:
            raise DataError(f"{where} has {name}, and there is no tokenizer: set --tokenizer, or provide input_ids")
        found: list[int] = self._tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        # Some tokenizers append an end token; it must occur once, at the end of the sample.
        while begins and found and found[-1] == end:
            found = found[:-1]
        beyond = [one for one in found if one >= self._vocabulary]
        if beyond:
            raise DataError(f"{where}: token {beyond[0]} of the tokenizer, but the model has {self._vocabulary}")
        return found

    def _end(self) -> list[int]:
        end = None if self._tokenizer is None else self._tokenizer.eos_token_id
        return [] if end is None else [end]


def _all(values: Any, kind: Any) -> bool:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


_MAX_LENGTH = 4096


class JobInputs(NamedTuple):
    """Opened and validated inputs of a job."""

    config: Any
    tokenizer: Any
    corpus: JsonLinesCorpus
    encoder: SampleEncoder
    length: int


def open_job_inputs(job: FinetuneJob) -> JobInputs:
    """Open model, tokenizer and data. Check the first line of each file before anything starts."""
    corpus = open_corpus(job.data)
    config = load_model_config(job)
    tokenizer = load_tokenizer(job)
    length = max_sample_length(job, config)
    encoder = SampleEncoder(tokenizer, length, vocabulary_size(config), job.too_long)
    for index in corpus.first_index_of_files():
        encoder(corpus[index], corpus.location_of(index))
    return JobInputs(config, tokenizer, corpus, encoder, length)


def load_model_config(job: FinetuneJob) -> Any:
    """Return the configuration of the model or of a separate file."""
    with optional_imports(*FINETUNE_EXTRA):
        from transformers import AutoConfig

    if bool(job.model) == bool(job.config):
        raise ModelError("say --model FOLDER or NAME, or --config FILE to begin with random weights; one of the two")
    try:
        if job.model:
            return AutoConfig.from_pretrained(job.model)
        tree = json.loads(Path(job.config).read_text(encoding="utf-8"))
        return AutoConfig.for_model(**tree)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{job.model or job.config} is not a model configuration: {first_line_of(error)}") from error


def max_sample_length(job: FinetuneJob, config: Any) -> int:
    """Return the maximum tokens of a sample."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or _MAX_LENGTH
    if job.length is not None and job.length > limit:
        raise ModelError(f"--length is {job.length}, but the model has no more than {limit} positions")
    return job.length or min(limit, _MAX_LENGTH)


def vocabulary_size(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def load_tokenizer(job: FinetuneJob) -> Any:
    """Return the tokenizer, or None without one: then lines must contain tokens."""
    with optional_imports(*FINETUNE_EXTRA):
        from transformers import AutoTokenizer

    place = job.tokenizer or job.model
    if not place:
        return None
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if job.tokenizer:
            raise ModelError(f"--tokenizer {place}: cannot load a tokenizer: {first_line_of(error)}") from error
        return None  # lines of tokens need none; other lines raise an error


def first_line_of(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
