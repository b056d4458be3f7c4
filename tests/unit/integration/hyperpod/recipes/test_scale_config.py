"""HyperPod's published recipes (``tests/golden/hyperpod-recipes``) against our planner."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from elastic.batch_scaling.batch_plan import RankQuota
from elastic.errors import PolicyError
from integration.hyperpod.recipes.scale_config import (
    RecipeSize,
    UnevenBatch,
    data_parallel_size,
    lr_table_of_recipe,
    read_scale_config,
)

GOLDEN = Path(__file__).parents[4] / "golden" / "hyperpod-recipes"
EXCERPT = GOLDEN / "llama3_1_8b_sft_lora.yaml"
TABLES = json.loads((GOLDEN / "scale_configs.json").read_text())["tables"]
RECIPES = {name: table["sizes"] for table in TABLES for name in table["recipes"]}


def args(batch=128, micro=None, rate=4e-4, uneven=None):
    stated = {"train_batch_size": batch, "micro_train_batch_size": micro, "learning_rate": rate}
    if uneven is not None:
        small_ranks, small, large = uneven
        stated["uneven_batch"] = {
            "use_uneven_batch": True,
            "num_dp_groups_with_small_batch_size": small_ranks,
            "small_local_batch_size": small,
            "large_local_batch_size": large,
        }
    return {name: value for name, value in stated.items() if value is not None}


def recipe(*rows):
    return {
        "scale_config": {
            nodes: {"trainer": {"num_nodes": nodes}, "training_config": {"training_args": args(*stated)}}
            for nodes, *stated in rows
        }
    }


def test_there_are_as_many_recipes_as_are_published():
    assert len(RECIPES) == 46
    by_sizes = [tuple(row[0] for row in rows) for rows in RECIPES.values()]
    assert by_sizes.count((1, 2, 4, 6, 8, 16)) == 20
    assert by_sizes.count((1, 2, 4, 8, 16)) == 16
    assert by_sizes.count((1, 2, 3, 4, 6, 8, 16)) == 10


@pytest.mark.parametrize("name", RECIPES)
def test_single_microbatch_limit_reproduces_every_size_of_a_recipe(name):
    """The planner gets only the largest microbatch that the recipe states."""
    rows = RECIPES[name]
    config = read_scale_config(yaml.safe_load(yaml.safe_dump(recipe(*rows))))
    assert config.max_microbatch == max((row[2] for row in rows if row[2]), default=None)
    for nodes, batch, micro, rate, uneven in rows:
        world = 8 * nodes
        plan = config.plan(nodes)
        assert sum(quota.ranks * quota.samples for quota in plan.quotas) == batch == 128
        assert config.sizes[nodes].learning_rate == rate
        if uneven is None:
            assert plan.quotas == (RankQuota(world, batch // world),)
        else:
            small_ranks, small, large = uneven
            assert plan.quotas == (RankQuota(world - small_ranks, large), RankQuota(small_ranks, small))
            assert small_ranks * small + (world - small_ranks) * large == batch
            assert plan.accumulation_steps == 1
        if micro is not None:
            assert plan.microbatch_size == micro
            assert plan.accumulation_steps * micro * world == batch
    assert config.disagreements() == []


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("ranks_per_node", [1, 4, 8])
def test_every_recipe_plans_between_its_sizes_and_on_other_machines(name, ranks_per_node):
    config = read_scale_config(recipe(*RECIPES[name]))
    for nodes in range(1, 17):
        plan = config.plan(nodes, ranks_per_node=ranks_per_node)
        assert plan.world_size == nodes * ranks_per_node
        assert plan.max_rank_samples - plan.min_rank_samples <= 1
        assert plan.microbatch_size <= (config.max_microbatch or 1)


def test_excerpt_file_is_read():
    config = read_scale_config(EXCERPT)
    assert config.name == EXCERPT.name
    assert list(config.sizes) == [1, 2, 3, 4, 6, 8, 16]
    assert config.sizes[1] == RecipeSize(1, 1, 128, 8, 0.0004, None)
    assert config.sizes[3] == RecipeSize(3, 3, 128, None, 0.0004, UnevenBatch(16, 5, 6))
    assert read_scale_config(str(EXCERPT)) == config
    assert read_scale_config(recipe(*RECIPES["llama3_1_8b_instruct_seq4k_gpu_sft_lora"])).sizes == config.sizes
    assert config.disagreements() == []


def test_recipes_for_four_devices_a_node_do_not_add_up():
    """They name machines with four devices, but their uneven batches are those of eight."""
    found = {(wrong.nodes, wrong.field): wrong for wrong in read_scale_config(EXCERPT).disagreements(ranks_per_node=4)}
    small = found[3, "num_dp_groups_with_small_batch_size"]
    assert (small.stated, small.planned) == (16, 12)
    total = found[6, "train_batch_size"]
    assert (total.stated, total.planned) == (128, 16 * 2 + 8 * 3)
    assert found[6, "uneven_batch"].planned == UnevenBatch(16, 5, 6)
    assert "scale_config.6: train_batch_size is 128, planned is 56" in str(total)


@pytest.mark.parametrize(
    ("rows", "field", "theirs", "ours"),
    [
        ([(1, 128, 7)], "micro_train_batch_size", 7, 6),
        ([(1, 128, 4), (2, 128, 2)], "micro_train_batch_size", 2, 4),
        ([(3, 128, 8)], "uneven_batch", None, UnevenBatch(16, 5, 6)),
        ([(3, 128, None, 1e-4, (20, 4, 12))], "uneven_batch", UnevenBatch(20, 4, 12), UnevenBatch(16, 5, 6)),
        ([(3, 128, None, 1e-4, (16, 5, 7))], "train_batch_size", 128, 136),
        ([(32, 128, 1)], "train_batch_size", 128, "nothing"),
    ],
)
def test_numbers_that_we_would_not_plan_are_named(rows, field, theirs, ours):
    found = read_scale_config(recipe(*rows)).disagreements()
    assert (field, theirs, ours) in [(wrong.field, wrong.stated, wrong.planned) for wrong in found]


def test_size_with_a_different_node_count_is_named():
    wrong = recipe((2, 128, 4))
    wrong["scale_config"][2]["trainer"]["num_nodes"] = 4
    (found,) = read_scale_config(wrong).disagreements()
    assert (found.nodes, found.field, found.stated, found.planned) == (2, "trainer.num_nodes", 4, 2)


@pytest.mark.parametrize("uneven", [(16, 8, 9), (0, 7, 8), (16, 8, 0)])
def test_uneven_batch_may_be_even(uneven):
    assert read_scale_config(recipe((2, 128, 8, 1e-4, uneven))).disagreements() == []


def test_values_missing_in_a_size_come_from_the_recipe():
    stated = recipe((1, 64, 4), (2, 64))
    stated["training_config"] = {"training_args": {"train_batch_size": 16, "micro_train_batch_size": 2}}
    del stated["scale_config"][2]["training_config"]["training_args"]["train_batch_size"]
    stated["scale_config"][2]["training_config"]["training_args"]["max_len"] = 4096
    sizes = read_scale_config(stated).sizes
    assert (sizes[1].global_batch, sizes[1].microbatch) == (64, 4)
    assert (sizes[2].global_batch, sizes[2].microbatch) == (16, 2)


def test_disabled_uneven_batches_are_ignored():
    stated = recipe((2, 128, 8, 1e-4, (1, 1, 1)))
    stated["scale_config"][2]["training_config"]["training_args"]["uneven_batch"]["use_uneven_batch"] = False
    assert read_scale_config(stated).sizes[2].uneven is None


def test_numbers_may_be_text():
    """YAML 1.1 reads ``1e-4`` as text, and keys in quotes are text."""
    (size,) = read_scale_config(recipe(("8", "128", "2", "1e-4"))).sizes.values()
    assert size == RecipeSize(8, 8, 128, 2, 1e-4, None)


def test_size_holds_until_the_next_larger_one():
    config = read_scale_config(recipe((2, 128, 8, 1e-4), (8, 256, 8, 2e-4)))
    assert [config.size_for(nodes).global_batch for nodes in (2, 7, 8, 99)] == [128, 128, 256, 256]
    with pytest.raises(PolicyError, match="no size for 1 nodes, its smallest size is 2"):
        config.size_for(1)


def test_single_sample_is_assumed_to_fit_without_a_microbatch():
    config = read_scale_config(recipe((1, 128)))
    assert (config.plan(1).microbatch_size, config.plan(1).accumulation_steps) == (1, 16)
    assert config.plan(1, max_microbatch=4).accumulation_steps == 4


def test_ranks_that_share_samples():
    assert data_parallel_size(6, 8, model_parallel=4) == 12
    assert read_scale_config(EXCERPT).plan(6, model_parallel=4).quotas == (RankQuota(8, 11), RankQuota(4, 10))
    with pytest.raises(PolicyError, match="model_parallel is 5: it must divide 48 ranks"):
        data_parallel_size(6, 8, model_parallel=5)


def spoil(path, value):
    stated = copy.deepcopy(recipe((1, 128, 8, 1e-4, (8, 16, 17))))
    inner = stated["scale_config"][1]
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return stated


ARGS = ("training_config", "training_args")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, "scale_config is missing"),
        ({"scale_config": {}}, "scale_config is missing or empty"),
        ({"scale_config": [1]}, "scale_config is missing or empty"),
        ({"scale_config": {1: None}}, "scale_config.1 is None"),
        ({"scale_config": {"many": {}}}, "key is 'many'"),
        ({"scale_config": {1: {}}}, "train_batch_size is missing"),
        ({"scale_config": {**recipe((1, 8))["scale_config"], **recipe(("1", 8))["scale_config"]}}, "occurs twice"),
        (spoil((*ARGS, "train_batch_size"), 0), "train_batch_size is 0"),
        (spoil((*ARGS, "train_batch_size"), 12.5), "train_batch_size is 12.5"),
        (spoil((*ARGS, "train_batch_size"), "${base.batch}"), "train_batch_size is '${base.batch}'"),
        (spoil((*ARGS, "micro_train_batch_size"), True), "micro_train_batch_size is True"),
        (spoil((*ARGS, "learning_rate"), "fast"), "learning_rate is 'fast'"),
        (spoil((*ARGS, "learning_rate"), "nan"), "learning_rate is 'nan'"),
        (spoil((*ARGS, "learning_rate"), -1e-4), "learning_rate is -0.0001"),
        (spoil((*ARGS, "uneven_batch"), [1]), "uneven_batch is [1]"),
        (spoil((*ARGS, "uneven_batch", "small_local_batch_size"), None), "small_local_batch_size is None"),
        (spoil(("trainer", "num_nodes"), -2), "trainer.num_nodes is -2"),
    ],
)
def test_missing_or_non_numeric_value_is_named(wrong, named):
    with pytest.raises(PolicyError) as found:
        read_scale_config(wrong)
    assert named in str(found.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"a: [", "is not YAML"), (b"\xff\xfe\x00", "is not YAML"), (b"- 1", "holds no recipe"), (b"", "holds no recipe")],
)
def test_invalid_recipe_files_are_refused(tmp_path, content, named):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as found:
        read_scale_config(path)
    assert named in str(found.value)
    assert "recipe.yaml" in str(found.value)


def test_missing_scale_config_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_scale_config(tmp_path / "recipe.yaml")


def test_yaml_runs_nothing(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("scale_config: !!python/object/apply:os.getpid []\n")
    with pytest.raises(PolicyError, match="is not YAML"):
        read_scale_config(path)


def test_a_recipe_is_a_table():
    """None of those that are published changes the learning rate, so nor does the table of one."""
    table = lr_table_of_recipe(GOLDEN / "llama3_1_8b_sft_lora.yaml", 0.0004)
    assert table.rates == dict.fromkeys((8, 16, 24, 32, 48, 64, 128), 0.0004)
    assert [table.scale(128, world).lr for world in (8, 40, 128)] == [1.0, 1.0, 1.0]
    assert list(lr_table_of_recipe(GOLDEN / "llama3_1_8b_sft_lora.yaml", 0.0004, model_parallel=4).rates)[:2] == [2, 4]


def test_recipe_without_a_learning_rate_is_refused():
    args = {"train_batch_size": 128}
    with pytest.raises(PolicyError, match=r"scale_config\.2 and the recipe state no learning_rate"):
        lr_table_of_recipe({"scale_config": {2: {"training_config": {"training_args": args}}}}, 1e-3)
