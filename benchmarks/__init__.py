"""Benchmarks behind docs/benchmarks.md: ``python -m benchmarks``.

- Setup: ``parameters``, ``states``, ``sandbox``, ``ranks`` and ``nodes``.
- Method: ``rounds`` interleaves contenders and compares results. ``limits``, ``opponents``, ``clients``, ``wires`` and
  ``fetchers`` are the contenders to compare with.
- Subjects: ``blocked``, ``save``, ``load``, ``drain``, ``planning``, ``agent_start``, ``memory``, ``replicate``,
  ``hydrate``, ``reshard``, ``peer_memory``, ``fixed_tree``, ``resize``, ``recovery`` and ``meeting``.
- Whole jobs: ``jobs`` starts them, each under a ``warden``; their ranks write a ``diary``.
- Reports: ``goals`` compares with targets, ``table`` and ``summary`` write the pages.

The other modules are separate programs, for example ``python -m benchmarks.samples``.
"""
