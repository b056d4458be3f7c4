"""SageMaker's memory service: complete shards over HTTP (``/v1/cp/*``).

::

    POST shard ──> limits ──> a slot of the arena ──> sealed ──> replicas on other nodes' agents

    GET shard  ──> this node's slot, otherwise another node's, compared with the seal before it is sent

The shards of all nodes (``namespace_inventory``) and each namespace's settings (``namespaces``) determine the listed
and the evicted steps. Each shard is a separate version of one job without trainers.
"""
