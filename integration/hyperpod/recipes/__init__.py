"""HyperPod's recipe files: reading them, and running the jobs they describe.

::

    document  a YAML file that remembers what was read of it        recipe    what a recipe says
    sizes, checkpoints, recovery, training                          one concern each, all of them values
    plan      batch and learning rate at every number of nodes      launch    words for `elastic run` and hyperpodrun
    resource  the HyperPodPyTorchJob                                command   `elastic recipe`

Keys that say nothing about any of this belong to others: they are left alone, and named.
"""

from integration.hyperpod.recipes.recipe import Recipe, read_recipe

__all__ = ["Recipe", "read_recipe"]
