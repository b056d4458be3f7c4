"""A Transformers ``Trainer`` that resumes by itself. Kill it at any time and start it again."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from integration.transformers import tiered

torch.manual_seed(0)  # the same data and the same new model after each start
lines = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (40, 16))]
arguments = TrainingArguments(
    "example-trainer",
    max_steps=40,
    per_device_train_batch_size=4,
    logging_steps=10,
    save_steps=20,  # the folders of the Trainer: exports, for from_pretrained and the hub
    save_only_model=True,  # the optimizer is in the tiers
    report_to=[],
    use_cpu=True,
)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
)
trainer = Trainer(model, arguments, train_dataset=lines)
trainer = tiered(trainer, "tiered://example-trainer", every=10)  # durable="s3://bucket/prefix", durable_every=100
trainer.train()  # from the newest complete step, if any
print(f"finished at step {trainer.state.global_step}")
