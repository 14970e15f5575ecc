"""Training as users start it: killed at random moments, on two ranks, resumed and refused."""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drafttrain.checkpoint import find_complete
from drafttrain.data.samples import read_table
from drafttrain.data.store_format import HEAD_NAME, plan_shards, write_meta
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_writer import ShardBuffer

from .conftest import ENVIRONMENT, drafttrain, kill_group
from .runs import copy_run, start_rank, trace, train_command

pytestmark = pytest.mark.xdist_group("training")
LAST = "step-000024"


def weights(recipe: Path, step: str = LAST) -> dict[str, torch.Tensor]:
    output = Path(yaml.safe_load(recipe.read_text())["output"])
    return load_file(output / "checkpoints" / step / "drafter" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(extracted, tmp_path_factory) -> Path:
    """A run by the command users type: the DeepSpeed launcher, one rank."""
    recipe = copy_run(extracted, tmp_path_factory.mktemp("undisturbed"))
    done = drafttrain("train", "--recipe", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe


def test_a_run_leaves_checkpoints_drafters_reports_and_a_trace(undisturbed):
    output = Path(yaml.safe_load(undisturbed.read_text())["output"])
    assert [m[0] for m in trace(undisturbed)] == list(range(1, 25))
    steps = [6, 12, 18, 24]
    folders = sorted(p.name for p in (output / "checkpoints").iterdir())
    assert folders == [f"step-{s:06d}" for s in steps]
    kept = [p.name for p in (output / "checkpoints").glob("*/deepspeed")]
    assert len(kept) == 2  # optimizer state of the newest two, drafters of all
    for step in steps:
        report = json.loads((output / "reports" / f"step-{step:06d}.json").read_text())
        assert report["step"] == step and (output / "reports" / f"step-{step:06d}.md").exists()
    # (fault kind 82)
    config = json.loads((output / "checkpoints" / LAST / "drafter" / "config.json").read_text())
    assert config["trained_length"] == FeatureStore(output / "store" / "train").lengths.max()
    first = weights(undisturbed, "step-000006")["fc.weight"]
    assert not torch.equal(weights(undisturbed)["fc.weight"], first)


def test_training_killed_ten_times_follows_the_undisturbed_trace(undisturbed, extracted, tmp_path):
    """(fault kinds 33, 60, 62, 66, the single-rank part)"""
    recipe = copy_run(extracted, tmp_path, checkpoint_every=6)
    rng = random.Random(0)
    kills = 0
    while kills < 10:
        process = start_rank(recipe)
        metrics = tmp_path / "run" / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        # Wait until it steps, then kill at a random moment of training or checkpointing.
        while process.poll() is None and (
            not metrics.exists() or metrics.stat().st_mtime_ns == before
        ):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        if process.poll() is not None:
            assert process.returncode == 0, process.stdout.read()
            break
        kill_group(process)
        process.stdout.close()
        kills += 1
        # Nothing that claims to be complete is damaged, whatever the moment.
        newest = find_complete(tmp_path / "run" / "checkpoints", resumable=True)
        assert newest is None or (newest / "COMPLETE.json").exists()
        if newest is not None and newest.name == LAST:
            shutil.rmtree(newest)  # finished too early: make the last stretch be done again
    assert kills == 10
    process = start_rank(recipe)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert trace(recipe) == trace(undisturbed)
    ours, theirs = weights(recipe), weights(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_follow_the_trace_of_one(undisturbed, extracted, tmp_path, stage):
    recipe = copy_run(extracted, tmp_path, zero_stage=stage)
    done = drafttrain("train", "--ranks", "2", "--recipe", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = trace(undisturbed), trace(recipe)
    assert len(one) == len(two) == 24
    for (step, loss, lr, norm, samples), other in zip(one, two, strict=True):
        assert other[0] == step and other[2] == lr and other[4] == samples
        assert other[1] == pytest.approx(loss, rel=2e-5)
        assert other[3] == pytest.approx(norm, rel=2e-4)
    for name, weight in weights(undisturbed).items():
        assert torch.allclose(weights(recipe)[name], weight, atol=2e-5), name


def copy_decoded(store: FeatureStore, table: Path, folder: Path) -> None:
    """The same states, decoded, as a store of codec fp32."""
    folder.mkdir(parents=True)
    shutil.copy(store.path / HEAD_NAME, folder / HEAD_NAME)
    meta = store.meta.model_copy(update={"codec": "fp32"})
    write_meta(folder, meta)
    samples = read_table(table)
    for shard in plan_shards(store.lengths, meta.shard_tokens):
        buffer = ShardBuffer(meta, shard, [samples[i] for i in range(shard.first, shard.stop)])
        for i in range(shard.first, shard.stop):
            sample = store.sample(i)
            buffer.add(i - shard.first, sample.taps, sample.final)
        buffer.seal(folder)


def test_training_and_replay_on_fp8_are_those_on_its_decoded_values(
    undisturbed, extracted, tmp_path
):
    """Decoding on the way to the drafter is bit for bit decoding beforehand."""
    recipes = {name: copy_run(extracted, tmp_path / name) for name in ("fp8", "decoded")}
    runs = {name: tmp_path / name / "run" for name in recipes}
    for run in runs.values():
        shutil.rmtree(run / "store")
    codec = "extract.codec=fp8"
    done = drafttrain("extract", "--recipe", str(recipes["fp8"]), codec)
    assert done.returncode == 0, done.stderr
    for split in ("train", "eval"):
        store = FeatureStore(runs["fp8"] / "store" / split)
        assert drafttrain("store", "verify", str(store.path)).returncode == 0
        table = runs["fp8"] / "samples" / f"{split}.parquet"
        copy_decoded(store, table, runs["decoded"] / "store" / split)
    for recipe in recipes.values():
        process = start_rank(recipe)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert trace(recipes["fp8"]) == trace(recipes["decoded"])
    replays = [
        json.loads((run / "reports" / "step-000024.json").read_text())["replay"]
        for run in runs.values()
    ]
    assert replays[0] == replays[1]
    # Rounding shows, but little: the loss is that of the exact store within a few percent.
    losses = [[line[1] for line in trace(recipe)] for recipe in (recipes["fp8"], undisturbed)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)


def test_resuming_under_another_recipe_or_rank_count_is_refused(undisturbed, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    values = yaml.safe_load(undisturbed.read_text())
    shutil.copytree(values["output"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / LAST)
    values["output"] = str(tmp_path / "run")
    recipe.write_text(yaml.safe_dump(values))
    done = drafttrain("train", "--recipe", str(recipe), "train.lr=1e-3")
    assert done.returncode == 2
    assert "was trained with train.lr = 0.0006, the recipe says 0.001" in done.stderr
    done = drafttrain("train", "--ranks", "2", "--recipe", str(recipe))
    assert done.returncode == 2 and "was written by 1 ranks" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000018" / "COMPLETE.json").exists()


def test_a_second_start_beside_a_live_one_is_refused(extracted, tmp_path):
    recipe = copy_run(extracted, tmp_path, epochs=200.0)
    first = start_rank(recipe)
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert first.poll() is None, first.stdout.read()
            time.sleep(0.05)
        second = start_rank(recipe)
        output, _ = second.communicate()
        assert second.returncode == 2 and f"process {first.pid} is already training" in output
    finally:
        kill_group(first)
        first.stdout.close()


def test_a_damaged_newest_checkpoint_is_skipped_and_nothing_is_deleted(undisturbed, tmp_path):
    """(fault kinds 66, 102, the single-rank part)"""
    values = yaml.safe_load(undisturbed.read_text())
    shutil.copytree(values["output"], tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / LAST
    state = next((newest / "deepspeed").glob("*.pt"))
    state.write_bytes(b"")
    values["output"] = str(tmp_path / "run")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    process = start_rank(recipe)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert f"skipping checkpoint {newest}" in output and "continuing from" in output
    assert newest.with_name(f"{LAST}.aside-1").is_dir()
    assert trace(recipe) == trace(undisturbed)


def test_train_py_without_a_launcher_says_so(extracted):
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "RANK"}
    done = subprocess.run(train_command(extracted), env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "it needs a launcher" in done.stderr


def test_training_before_extraction_names_the_missing_step(target, tmp_path):
    from . import tiny

    recipe = tiny.make_recipe(tmp_path, target)
    done = drafttrain("train", "--recipe", str(recipe))
    assert done.returncode == 2 and "run `drafttrain extract`" in done.stderr


def test_eval_decodes_live_and_prints_the_report(undisturbed, tmp_path):
    output = Path(yaml.safe_load(undisturbed.read_text())["output"])
    options = ["eval.live_prompts=3", "eval.max_new_tokens=16", "eval.temperatures=[0.0, 1.0]"]
    done = drafttrain("eval", "--recipe", str(undisturbed), *options)
    assert done.returncode == 0, done.stderr
    for title in ("Acceptance length, replay", "Losslessness", "Replay against live", "Speed"):
        assert title in done.stdout
    file = output / "reports" / "step-000024.json"
    report = json.loads(file.read_text())
    for section in report["live"]:
        for row in section["lossless"]:
            assert row["identical"] == row["responses"] == 3
    picture = tmp_path / "report.svg"
    shown = drafttrain("report", str(file), "--svg", str(picture))
    assert shown.returncode == 0 and "Losslessness" in shown.stdout
    assert picture.read_text().startswith("<svg") and "@font-face" not in picture.read_text()
    # A drafter from outside the run is evaluated the same way, into a folder of its own.
    out = tmp_path / "drafter"
    assert drafttrain("export", "-r", str(undisturbed), "--out", str(out)).returncode == 0
    done = drafttrain("eval", "-r", str(undisturbed), "--checkpoint", str(out))
    assert done.returncode == 0, done.stderr
    assert (output / "reports" / "drafter" / "step-000000.json").exists()
