"""Small training runs of the Transformers ``Trainer``, for processes that tests fork and kill."""

from __future__ import annotations

import hashlib
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from integration.transformers import tiered
from tests.support.bits import tensor_bytes

VOCABULARY, SAMPLES, STEPS = 64, 24, 8
URL = "tiered://trainer"


class NumberedLines(torch.utils.data.Dataset):
    """Lines of tokens; the first two tokens are the number of the line."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        tokens[0], tokens[1] = index // 8, index % 8
        return {"input_ids": tokens, "labels": tokens}


class Events(TrainerCallback):
    """Reports losses as hex and sends signals to this process.

    A signal is sent at ``step N`` or after the log entry at ``log N``.
    """

    def __init__(self, say: Any, signals: dict[str, int]) -> None:
        self.say = say
        self._signals = signals
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.say(f"state {state.global_step} {digest_of_state(self.trainer)}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.say(f"state {state.global_step} {digest_of_state(self.trainer)}")
        self._send(f"step {state.global_step}")

    def _send(self, moment: str) -> None:
        if moment in self._signals:
            self.trainer._checkpointer.wait()  # so that the test knows which steps are complete
            os.kill(os.getpid(), self._signals[moment])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.say(f"loss {state.global_step} {logs['loss'].hex()}")
            self._send(f"log {state.global_step}")
        if "eval_loss" in logs:
            self.say(f"eval {state.global_step} {logs['eval_loss'].hex()}")


def make_model(**config: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1,
            **{**sizes, **config},
        )
    )  # fmt: skip


def default_arguments(**arguments: Any) -> dict[str, Any]:
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return {**defaults, **arguments}


def digests_of_tensors(model: torch.nn.Module) -> dict[str, str]:
    return {name: hashlib.sha256(tensor_bytes(one)).hexdigest() for name, one in model.state_dict().items()}


def digest_of_state(trainer: Any) -> str:
    """Return a digest of the model, the optimizer and the learning rate."""
    total = hashlib.sha256(repr(sorted(digests_of_tensors(trainer.model).items())).encode())
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in sorted(trainer.optimizer.state[parameter].items()):
                total.update(name.encode() + tensor_bytes(value))
    total.update(repr([rate.hex() for rate in trainer.lr_scheduler.get_last_lr()]).encode())
    return total.hexdigest()


def describe_training(trainer: Any) -> dict[str, Any]:
    """Return the final state of a run, for comparison bit for bit."""
    return {
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "tensors": digests_of_tensors(trainer.model),
        "state": digest_of_state(trainer),
        "random": hashlib.sha256(tensor_bytes(torch.get_rng_state())).hexdigest(),
        "history": [one for one in trainer.state.log_history if "loss" in one],
    }


def describe_export(_say: Any, folder: str) -> dict[str, str]:
    """Return digests of the tensors that the framework's own loader reads from a folder."""
    return digests_of_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def enter_rank() -> int:
    """Set the variables that ``torchrun`` sets, from the process group of this rank."""
    if not dist.is_initialized():
        return 0
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = "29500"  # nothing connects to it: the process group exists
    return rank


def llama_trainer(folder: str, arguments: dict[str, Any], options: dict[str, Any], events: Events) -> Any:
    return make_trainer(make_model(), folder, arguments, options, events)


def lora_trainer(folder: str, arguments: dict[str, Any], options: dict[str, Any], events: Events) -> Any:
    """Make a trainer of LoRA adapters only."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return make_trainer(get_peft_model(make_model(), config), folder, arguments, options, events)


def make_trainer(model: Any, folder: str, arguments: dict[str, Any], options: dict[str, Any], events: Events) -> Any:
    trainer = Trainer(
        model,
        TrainingArguments(folder, **default_arguments(**arguments)),
        train_dataset=NumberedLines(),
        eval_dataset=NumberedLines(),
        callbacks=[events],
    )
    return tiered(trainer, URL, **options)


def train(
    say: Any,
    folder: str,
    signals: dict[int, dict[str, int]] | None = None,
    arguments: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    make: Any = llama_trainer,
) -> dict[str, Any]:
    """Train and describe the final state; ``signals`` are by rank and moment."""
    rank = enter_rank()
    events = Events(say, (signals or {}).get(rank, {}))
    events.trainer = trainer = make(folder, arguments or {}, options or {}, events)

    def note_samples(model: Any, args: Any, kwargs: Any) -> None:
        if model.training:
            numbers = [8 * int(line[0]) + int(line[1]) for line in kwargs["input_ids"]]
            say(f"samples {trainer.state.global_step + 1} {' '.join(map(str, numbers))}")

    trainer.model.register_forward_pre_hook(note_samples, with_kwargs=True)
    say(f"callbacks {' '.join(type(one).__name__ for one in trainer.callback_handler.callbacks)}")
    trainer.train()
    return describe_training(trainer)


def run_example(_say: Any, path: str, folder: str) -> int:
    """Run a script in a folder; return the step of its trainer."""
    os.chdir(folder)
    return runpy.run_path(path)["trainer"].state.global_step


def values_by_step(lines: list[str], kind: str = "loss") -> dict[int, str]:
    """Return the rest of each line of this kind by step."""
    found = [line.split(maxsplit=2) for line in lines if line.startswith(f"{kind} ")]
    return {int(step): value for _, step, value in found}


KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


def newest_folder(folder: str | Path) -> Path:
    return max(Path(folder).glob("checkpoint-*"), key=lambda one: int(one.name.partition("-")[2]))
