"""Every figure of docs/benchmarks.md, measured again: ``python -m benchmarks``.

The modules read in this order: ``parameters`` say what is measured, ``states`` are what is saved, ``ranks`` run it in a
``sandbox``, ``rounds`` interleave and compare, ``limits``, ``opponents`` and ``clients`` are what we stand beside;
``blocked``, ``save``, ``load``, ``drain``, ``planning``, ``agent_start``, ``memory`` are the subjects. With several
``nodes``, ``replicate`` and ``hydrate`` stand beside ``wires`` and ``fetchers``, then ``reshard`` and ``peer_memory``.
``resize`` and ``recovery`` start whole ``jobs``, each under a ``warden``, whose ranks write a ``diary``.
``goals`` judge and ``table`` shows. ``samples`` stands alone: ``python -m benchmarks.samples``.
"""
