"""SageMaker's memory service: whole shards over HTTP (``/v1/cp/*``).

::

    POST shard ──> limits ──> a slot of the arena ──> sealed ──> copies on other nodes' agents
    GET shard  ──> this node's slot, else the other nodes that have it, compared with the seal before it leaves
    what is listed and what is kept follow from what all nodes hold (views.py, retention.py) and from what was said of
    namespaces (registry.py); each shard is a version of its own of one job that has no trainers
"""
