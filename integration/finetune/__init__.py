"""Fine-tuning of Transformers models without code: a model, JSON lines, a range of nodes.

::

    command    `elastic finetune`: checks, starts `elastic run`, shows how far it is
    worker     a rank: also under torchrun and hyperpodrun, as -m integration.finetune.worker
    options    words of both ──> job        what is to be done, all of it said
    corpus ──> encoding ──> samples         lines ──> tokens with weights ──> microbatches, prepared once a node
    models, training, exporting             sharded, trained in any world, written for from_pretrained

Transformers is needed by the ranks only (extra ``finetune``); torch is imported by them alone.
"""
