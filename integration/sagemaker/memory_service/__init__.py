"""SageMaker's memory service: whole shards over HTTP (``/v1/cp/*``).

::

    POST shard ──> limits ──> a slot of the arena ──> sealed ──> replicas on other nodes' agents
    GET shard  ──> this node's slot, else another node that has it, compared with the seal before it leaves

What is listed and what is evicted follow from what all nodes hold (``namespace_inventory``) and from each namespace's
settings (``namespaces``). Each shard is a version of its own of one job without trainers.
"""
