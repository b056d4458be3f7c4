"""Fine-tuning of Transformers models without code: a model, JSON lines, a range of nodes.

::

    finetune_cli ──> finetune_job     `elastic finetune`: checks the job, starts `elastic run`, shows progress
    worker ──> training               a rank, also under torchrun and hyperpodrun: -m integration.finetune.worker
    inputs, model                     lines ──> tokens with weights ──> microbatches; sharding and export

Only the ranks need Transformers (extra ``finetune``); only they import torch.
"""
