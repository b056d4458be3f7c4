"""Batch inference: a function applied to lines of JSON by nodes that come and go (``elastic map``).

::

    chunk_plan ──> work_directory ──> map_worker        one process: claims chunks and calls the function
                                 └──> map_node          one node: starts workers, joins the output
    map_task ──> map_worker                             the function, and errors of single inputs

Correctness never depends on leases. A chunk's output is linked to its final name, which fails if another worker was
first, so a chunk has exactly one output. Leases only avoid that two workers compute the same chunk.
"""
