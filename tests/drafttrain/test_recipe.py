"""Recipes: resolved, overridden, and refused with one clear line per problem."""

from pathlib import Path

import pytest
import yaml

from drafttrain.data.errors import RecipeError
from drafttrain.recipe import load_recipe

MINIMAL = {
    "output": "runs/x",
    "target": {"path": "models/x", "dtype": "float32"},
    "data": {
        "train": [{"path": "a.jsonl", "name": "a"}],
        "eval": [{"path": "b.parquet", "name": "b"}],
        "max_length": 64,
    },
    "drafter": {
        "block_size": 8,
        "mask_token_id": 17,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
    },
    "train": {"global_batch": 8, "micro_batch": 4, "precision": "fp32", "checkpoint_every": 10},
}


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_defaults_are_the_published_baseline(recipe_file):
    recipe = load_recipe(recipe_file)
    train = recipe.train
    assert (train.lr, train.warmup, train.clip, train.epochs, train.anchors) == (
        6e-4,
        0.04,
        1.0,
        6.0,
        512,
    )
    assert recipe.table("eval") == Path("runs/x/samples/eval.parquet")


def test_overrides_win_and_are_typed(recipe_file):
    recipe = load_recipe(recipe_file, ("train.lr=1e-3", "data.train.0.limit=5", "seed=3"))
    assert recipe.train.lr == 1e-3 and recipe.data.train[0].limit == 5 and recipe.seed == 3


def test_a_resolved_recipe_loads_to_the_same_recipe(recipe_file, tmp_path):
    spread = ("target.device=spread", "target.max_memory={0: 60GB, cpu: 1TB}")
    recipe = load_recipe(recipe_file, ("train.lr=1e-3", *spread))
    assert recipe.target.max_memory == {0: "60GB", "cpu": "1TB"}
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(recipe.resolved()))
    assert load_recipe(again) == recipe
    assert load_recipe(recipe_file, ("output=elsewhere",)).hash != recipe.hash
    same = ("train.lr=1e-3", *spread, "output=elsewhere", "extract.store=there")
    assert load_recipe(recipe_file, same).hash == recipe.hash


MALFORMED = [
    ("train.lrr=1", "train.lrr: unknown key; did you mean 'lr'?"),
    ("nonsense=1", "nonsense: unknown key; known keys: data, drafter"),
    ("drafter.rope_thetaa=1", "drafter.rope_thetaa: unknown key"),
    ("data.train.0.pth=x", "data.train.0.pth: unknown key; did you mean 'path'?"),
    ("train.lr=fast", "train.lr: Input should be a valid number"),
    ("train.lr=0", "train.lr: Input should be greater than 0"),
    ("train.lr=-1", "train.lr: Input should be greater than 0"),
    ("train.micro_batch=3", "global_batch 8 is not a multiple of micro_batch 3"),
    ("train.micro_batch=2.5", "train.micro_batch: Input should be a valid integer"),
    ("train.precision=fp8", "train.precision: Input should be 'fp32' or 'bf16'"),
    ("train.zero_stage=4", "train.zero_stage: Input should be 0, 1, 2 or 3"),
    ("train.warmup=1.5", "train.warmup: Input should be less than 1"),
    ("train.ema=1", "train.ema: Input should be less than 1"),
    ("train.stop_after_skipped=0", "train.stop_after_skipped: Input should be greater than 0"),
    ("train.loggers=[paper]", "train.loggers.0: Input should be 'tensorboard', 'wandb' or"),
    ("train.activation_checkpointing=some", "train.activation_checkpointing: Input should be"),
    ("train={}", "train.global_batch: required key is missing"),
    ("drafter.head_dim=7", "head_dim 7 must be even"),
    ("drafter.num_key_value_heads=3", "not a multiple of num_key_value_heads 3"),
    ("drafter.block_size=1", "drafter.block_size: Input should be greater than or equal to 2"),
    ("drafter.block_size=128", "drafter.block_size 128 exceeds data.max_length 64"),
    ("drafter.mask_token_id=null", "drafter.mask_token_id: Input should be a valid integer"),
    ("drafter.layer_types=[full_attention]", "layer_types has 1 entries for 5 layers"),
    ("drafter.sliding_window=8", "sliding_window has no effect without a sliding_attention"),
    ("drafter.layer_types=[a, b, c, d, e]", "drafter.layer_types.0: Input should be"),
    ("data.train=[]", "data.train: List should have at least 1 item"),
    ("data.train.0.path=a.csv", "path 'a.csv' must end in .jsonl or .parquet"),
    ("data.max_length=0", "data.max_length: Input should be greater than 1"),
    ("data.regenerate.engine=server", "engine 'server' needs server_url and server_model"),
    ("data.regenerate.server_url=http://x", "no effect with engine 'local'"),
    ("extract.codec=int4", "extract.codec: Input should be"),
    ("extract.features=rolling", "extract: features rolling needs a budget, such as budget: 500GB"),
    ("extract.features=streamed", "extract.features: Input should be 'stored', 'rolling' or"),
    ("extract.budget=5GB", "budget and consumers are for features rolling, not stored"),
    ("extract.consumers=2", "budget and consumers are for features rolling, not stored"),
    ("target.dtype=int8", "target.dtype: Input should be"),
    ("target.device=gpu", "target.device: Input should be 'auto', 'cpu', 'cuda' or 'spread'"),
    ("target.max_memory={0: 6GB}", "max_memory has no effect with device 'auto': write spread"),
    ("target.max_memory={0: 6}", "target.max_memory.0: Input should be a valid string"),
    ("target.max_memory={0: 6 gigs}", "target.max_memory: '6 gigs' is not a size"),
    ("target.max_memory={disk: 6GB}", "'disk' is neither the number of a GPU nor 'cpu'"),
    ("target.max_memory={-1: 6GB}", "'-1' is neither the number of a GPU nor 'cpu'"),
    ("target.max_memory={}", "target.max_memory: Dictionary should have at least 1 item"),
    ("target=models/x", "target: Input should be a valid dictionary"),
    ("eval.temperatures=[]", "eval.temperatures: List should have at least 1 item"),
    ("eval.tree_budgets=8", "eval.tree_budgets: Input should be a valid list"),
    ("output=null", "output: Input is not a valid path"),
]


@pytest.mark.parametrize(("override", "message"), MALFORMED)
def test_malformed_recipes_are_one_clear_line(recipe_file, override, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, (override,))
    assert message in str(caught.value) and str(recipe_file) in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("extract.features=rolling", "extract.budget=5"), "extract.budget: Input should be"),
        (("extract.features=rolling", "extract.budget=5 gigs"), "'5 gigs' is not a size"),
        (("extract.features=online", "target.device=spread"), "so it cannot be spread"),
    ],
)
def test_combinations_that_cannot_work(recipe_file, overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe_file, overrides)


def test_bf16_without_fp32_masters_is_refused(recipe_file):
    """(fault kind 64)"""
    with pytest.raises(RecipeError, match="zero_stage 1"):
        load_recipe(recipe_file, ("train.precision=bf16", "train.zero_stage=0"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "not of the form key.subkey=value"),
        ("=3", "not of the form key.subkey=value"),
        ("train.lr.x=3", "override 'train.lr.x=3'"),
        ("data.train.7.limit=3", "'data.train.7' is not a section"),
        ("train.lr=[", "the value is not valid YAML"),
    ],
)
def test_malformed_overrides(recipe_file, override, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, ("train.lr=1", override))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds NoneType"),
        (b"- a\n- b\n", "holds list"),
        (b"a: [1\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_missing_recipe_file_and_folder(tmp_path):
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["extract.engine=vllm"], "engine vllm needs server_url"),
        (["extract.server_url=http://host/v1"], "server_url is read by engine vllm only"),
        (["extract.engine=vllm", "extract.server_url=host:8000"], "extract.server_url"),
        (["extract.engine=sglang"], "extract.engine"),
    ],
)
def test_a_second_engine_and_its_server_come_together(recipe_file, overrides, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe_file, tuple(overrides))
    served = ("extract.engine=vllm", "extract.server_url=http://host:8000/v1")
    assert load_recipe(recipe_file, served).extract.engine == "vllm"
