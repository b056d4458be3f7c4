"""HyperPod's recipe files: reading them, and running the jobs they describe.

::

    yaml_document ──> recipe     a YAML file that records the keys read, and the values of a recipe
    scale_config                 its table of sizes: batch, microbatch and learning rate by number of nodes
    recipe_plan                  batch and learning rate at every number of nodes, and the job's command and resource
    recipe_cli                   `elastic recipe`

Unread keys are ignored and reported.
"""

from integration.hyperpod.recipes.recipe import Recipe, read_recipe

__all__ = ["Recipe", "read_recipe"]
