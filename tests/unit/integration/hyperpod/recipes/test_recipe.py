"""AWS's published recipes and others of the same shape: each plans, or its limit is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import PolicyError
from integration.hyperpod.recipes import read_recipe, recipe_plan
from integration.hyperpod.recipes.recipe import RecipeKind, RecipeRecovery
from integration.hyperpod.recipes.recipe_plan import policy_document, settings_document
from integration.hyperpod.recipes.yaml_document import open_recipe_document
from tests.support.example_counts import examples
from tieredckpt.settings import settings_from_mapping

PUBLISHED = Path(__file__).parents[4] / "golden" / "hyperpod-recipes" / "published"
FILES = sorted(PUBLISHED.glob("*.yaml"))
LORA = PUBLISHED / "llmft_qwen3_0_dot_6b_seq4k_gpu_sft_lora.yaml"
CHECKPOINTLESS = PUBLISHED / "checkpointless_llama3_70b_pretrain.yaml"


def changed(tmp_path, source, **changes):
    """Return a recipe with some dotted paths changed; ``None`` removes them."""
    tree = yaml.safe_load(source.read_text())
    for path, value in changes.items():
        *above, last = path.split("__")
        at = tree
        for name in above:
            at = at[int(name) if name.isdecimal() else name]
        last = int(last) if last.isdecimal() else last
        if value is None:
            del at[last]
        else:
            at[last] = value
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def refusal(file, **options):
    with pytest.raises(PolicyError) as caught:
        recipe_plan.plans_at_sizes(read_recipe(file, **options))
    return str(caught.value)


def test_there_are_as_many_as_were_published():
    assert len(FILES) == 39


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_published_recipe_plans_at_every_size_and_between(file):
    recipe = read_recipe(file)
    tree = yaml.safe_load(file.read_text())
    sizes = recipe_plan.plans_at_sizes(recipe)
    assert [one.nodes for one in sizes] == list(recipe.policy.sizes)
    if recipe.kind is RecipeKind.ELASTIC:
        assert list(recipe.policy.sizes) == sorted(tree["scale_config"])
        for one in sizes:
            args = tree["scale_config"][one.nodes]["training_config"]["training_args"]
            assert one.stated
            assert one.plan.global_batch == args["train_batch_size"]
            assert one.learning_rate == args["learning_rate"]
        between = recipe_plan.plans_at_sizes(recipe, range(1, 17))
        assert [one.nodes for one in between if one.stated] == list(recipe.policy.sizes)
        assert recipe.policy.graceful_shutdown_timeout_s == tree["elastic_policy"]["graceful_shutdown_timeout"]
    else:
        assert recipe.policy.sizes == (tree["trainer"]["num_nodes"],)
        assert sizes[0].plan.global_batch == tree["data"]["global_batch_size"]
    assert recipe_plan.disagreements(recipe) == []
    assert recipe_plan.learning_rate_table(recipe) is not None
    assert settings_from_mapping(settings_document(recipe)).peer.copies == 2
    assert policy_document(recipe.policy)["max_replicas"] == max(recipe.policy.sizes)


def test_keys_of_other_systems_are_ignored_and_named():
    left = read_recipe(LORA).unread_keys
    assert "instance_types" in left
    assert "training_config.model_config.model_save_name" in left
    assert not any(one.startswith(("elastic_policy", "scale_config")) for one in left)


def test_checkpointless_keys_mean_something_here():
    recipe = read_recipe(CHECKPOINTLESS)
    assert recipe.kind is RecipeKind.CHECKPOINTLESS
    assert (recipe.nodes, recipe.devices, recipe.model_parallel) == (16, 8, 32)
    (only,) = recipe_plan.plans_at_sizes(recipe)
    assert (only.plan.world_size, only.plan.accumulation_steps, only.learning_rate) == (4, 128, 3e-4)
    assert recipe.recovery == RecipeRecovery(in_process=True, live=True, copies=2)
    assert settings_document(recipe)["durable"] == {"every": 20, "keep_last": 2}
    assert recipe.prefetch is not None
    assert (recipe.prefetch.batches, recipe.prefetch.directory) == (10, "/dev/shm/pdl_cache")
    assert (recipe.training.beta2, recipe.training.warmup, recipe.training.min_rate) == (0.95, 2000, 3e-5)


def test_references_within_the_file_are_followed(tmp_path):
    file = changed(tmp_path, CHECKPOINTLESS, log_dir="/fsx/run", log__ckpt__dirpath="${recipes.log_dir}")
    assert read_recipe(file).checkpoints.durable == "/fsx/run"
    looping = changed(tmp_path, CHECKPOINTLESS, log_dir="${log.ckpt.dirpath}", log__ckpt__dirpath="${recipes.log_dir}")
    assert "log.ckpt.dirpath refers to itself" in refusal(looping)


def test_unknown_policy_keys_are_named_and_ignored(tmp_path):
    recipe = read_recipe(changed(tmp_path, LORA, elastic_policy__max_node=3))
    assert recipe.policy == read_recipe(LORA).policy
    assert recipe.notes == ("elastic_policy.max_node is unknown and has no effect",)
    assert "elastic_policy.max_node" in recipe.unread_keys


def test_a_step_between_sizes_instead_of_a_list(tmp_path):
    recipe = read_recipe(changed(tmp_path, LORA, elastic_policy__replica_increment_step=5))
    assert recipe.policy.sizes == (1, 6, 11, 16)
    assert [one.stated for one in recipe_plan.plans_at_sizes(recipe)] == [True, True, False, True]


def test_sizes_beyond_the_limits_are_reported_and_unused(tmp_path):
    recipe = read_recipe(changed(tmp_path, LORA, elastic_policy__max_nodes=4))
    assert recipe.policy.sizes == (1, 2, 3, 4)
    assert recipe.notes == ("scale_config.6, 8, 16 is beyond min_nodes 1 and max_nodes 4: never used",)


def test_constant_batch_applies_to_all_sizes(tmp_path):
    file = changed(tmp_path, LORA, scale_config=None, training_config__training_args={"train_batch_size": 64})
    recipe = read_recipe(file)
    assert {one.plan.global_batch for one in recipe_plan.plans_at_sizes(recipe, [1, 3, 8])} == {64}
    assert recipe_plan.learning_rate_table(recipe) is None


@pytest.mark.parametrize(
    ("source", "changes", "named"),
    [
        (LORA, {"elastic_policy__max_nodes": 0}, "elastic_policy.max_nodes is 0"),
        (LORA, {"elastic_policy__min_nodes": 20}, "max_nodes is 16, less than min_nodes (20)"),
        (LORA, {"elastic_policy__is_elastic": "maybe"}, "elastic_policy.is_elastic is 'maybe'"),
        (LORA, {"elastic_policy__scaling_timeout": "soon"}, "scaling_timeout is 'soon'"),
        (LORA, {"scale_config__1": None}, "elastic_policy.min_nodes is 1, but the smallest size of scale_config is 2"),
        (LORA, {"scale_config__2__trainer__num_nodes": 4}, "scale_config.2: trainer.num_nodes is 4, planned is 2"),
        (LORA, {"scale_config": {}}, "scale_config is missing or empty"),
        (LORA, {"scale_config": None, "training_config": None}, "training_config.training_args.train_batch_size"),
        (LORA, {"elastic_policy": 3}, "elastic_policy is 3: it must be a mapping"),
        (LORA, {"trainer": {"devices": 16}}, "scale_config.16"),
        (CHECKPOINTLESS, {"data__global_batch_size": 3}, "data.global_batch_size: world_size is 4"),
        (CHECKPOINTLESS, {"data__global_batch_size": None}, "data.global_batch_size is missing"),
        (CHECKPOINTLESS, {"strategy__tensor_model_parallel_size": 3}, "12 ranks for one model"),
        (CHECKPOINTLESS, {"trainer__num_nodes": None}, "trainer.num_nodes is missing"),
        (CHECKPOINTLESS, {"optim__config__lr": "fast"}, "optim.config.lr is 'fast'"),
        (CHECKPOINTLESS, {"mmap__checkpoint_frequency": 7}, "mmap.checkpoint_frequency is 7, but log.ckpt"),
    ],
)
def test_contradictions_name_the_file_and_the_key(tmp_path, source, changes, named):
    said = refusal(changed(tmp_path, source, **changes))
    assert "mine.yaml" in said
    assert named in said


def test_checkpointless_without_in_process_restart_is_refused(tmp_path):
    tree = yaml.safe_load(CHECKPOINTLESS.read_text())
    (callback,) = [one for one in tree["callbacks"] if one["_target_"].endswith("CheckpointlessCallback")]
    callback["enable_inprocess"] = False
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert "enable_checkpointless: true and enable_inprocess: false" in refusal(file)


def test_uneven_batches_are_replanned_for_other_machines():
    recipe = read_recipe(LORA, devices=4)
    assert [one.plan.world_size for one in recipe_plan.plans_at_sizes(recipe)] == [4, 8, 12, 16, 24, 32, 64]
    assert any("scale_config.6: train_batch_size" in str(one) for one in recipe_plan.disagreements(recipe))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' occurs twice, in lines 1 and 3"),
        ("- 1\n", "holds no recipe"),
        ("a: [1\n", "is not YAML"),
        ("a: 2026-99-99\n", "is not YAML"),
        ("? [1, 2]\n: 3\n? {a: 1}\n: 4\n", "is not YAML"),
        ("a: !!python/object/apply:os.system [x]\n", "is not YAML"),
        ("", "holds no recipe"),
    ],
)
def test_invalid_recipe_file_is_refused(tmp_path, text, named):
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(PolicyError, match=r"odd\.yaml") as caught:
        open_recipe_document(file)
    assert named in str(caught.value)


def test_missing_recipe_file_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="No such file"):
        read_recipe(tmp_path / "none.yaml")


def numbers(least, most):
    """As people write them."""
    return st.integers(least, most).flatmap(lambda number: st.sampled_from([number, str(number)]))


@st.composite
def tables(draw):
    """Draw a recipe of the published shape with arbitrary numbers."""
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True))
    devices = draw(st.sampled_from([1, 4, 8]))
    rate = draw(st.sampled_from([0.0004, "4e-4", 1e-5, None]))
    table = {}
    for nodes in sizes:
        batch = draw(st.integers(1, 2048))
        args = {"train_batch_size": batch}
        if draw(st.booleans()):
            args["micro_train_batch_size"] = draw(numbers(1, 16))
        if rate is not None:
            args["learning_rate"] = rate
        world = nodes * devices
        if batch % world and batch > world and draw(st.booleans()):
            args["uneven_batch"] = {
                "use_uneven_batch": True,
                "num_dp_groups_with_small_batch_size": world - batch % world + draw(st.sampled_from([0, 0, 0, 1])),
                "small_local_batch_size": batch // world,
                "large_local_batch_size": batch // world + 1,
            }
        table[nodes] = {"trainer": {"num_nodes": nodes}, "training_config": {"training_args": args}}
    policy = {"is_elastic": draw(st.booleans()), "min_nodes": draw(numbers(1, 8)), "max_nodes": draw(numbers(1, 64))}
    policy |= draw(
        st.fixed_dictionaries({}, optional={"scaling_timeout": numbers(0, 900), "faulty_timeout": st.just(5)})
    )
    policy |= draw(st.sampled_from([{}, {"replica_increment_step": 2}, {"unheard_of": 1}]))
    return {"run": {"name": "made"}, "trainer": {"devices": devices}, "elastic_policy": policy, "scale_config": table}


@given(tree=tables())
@settings(max_examples=examples(60))
def test_any_other_recipe_of_the_kind_plans_or_names_its_limit(tree):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.yaml"
        file.write_text(yaml.safe_dump(tree))
        try:
            recipe = read_recipe(file)
            sizes = recipe_plan.plans_at_sizes(recipe)
            recipe_plan.learning_rate_table(recipe)
        except PolicyError as error:
            said = str(error)
            assert "made.yaml" in said
            keys = ("scale_config", "elastic_policy", "trainer", "learning_rate", "nodes")
            assert any(key in said for key in keys), said
            return
    assert sizes
    for one in sizes:
        assert sum(quota.ranks * quota.samples for quota in one.plan.quotas) == one.plan.global_batch
        assert one.plan.world_size == one.nodes * recipe.devices
        stated = tree["scale_config"][max(size for size in tree["scale_config"] if size <= one.nodes)]
        assert one.plan.global_batch == stated["training_config"]["training_args"]["train_batch_size"]
