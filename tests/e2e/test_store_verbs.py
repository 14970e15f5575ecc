"""``drafttrain store ...`` as a user types it, on a finished run that is then damaged."""

import shutil
from pathlib import Path

import pytest
import yaml

from . import tiny
from .conftest import drafttrain


@pytest.fixture
def run(extracted, tmp_path) -> Path:
    """A copy of a run's folder."""
    output = Path(yaml.safe_load(extracted.read_text())["output"])
    return Path(shutil.copytree(output, tmp_path / "run"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_verify_lists_every_bad_shard_and_repair_restores_both_splits(extracted, run):
    """(fault kinds 33, 37)"""
    before = {split: contents(run / "store" / split) for split in ("train", "eval")}
    train = run / "store" / "train"
    flip(train / "shard-00000.safetensors")
    flip(train / "shard-00001.parquet")
    (run / "store" / "eval" / "shard-00000.json").write_text("{")
    done = drafttrain("store", "verify", str(train))
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2
    assert "shard-00000.safetensors" in lines[0] and "shard-00001.parquet" in lines[1]
    arguments = ("store", "repair", "-r", str(extracted), f"output={run}")
    done = drafttrain(*arguments)
    assert done.returncode == 0, done.stderr
    assert "train: 2 faults repaired" in done.stderr and "eval: 1 faults repaired" in done.stderr
    for split, files in before.items():
        assert contents(run / "store" / split) == files
    done = drafttrain("store", "verify", str(train))
    assert done.returncode == 0 and "all shards whole" in done.stderr


def test_verify_with_a_recipe_computes_states_again(extracted, run, tmp_path):
    """(fault kind 21)"""
    store = str(run / "store" / "train")
    done = drafttrain("store", "verify", store, "-r", str(extracted), "--tokens", "20")
    assert done.returncode == 0, done.stderr
    assert "20 tokens computed again" in done.stdout
    assert "tap 1" in done.stdout and "1.000000" in done.stdout
    assert drafttrain("store", "verify", store, "--tokens", "20").returncode == 2
    other = tiny.make_target(tmp_path / "other", "qwen3")
    recipe = tiny.make_recipe(tmp_path, other)
    done = drafttrain("store", "verify", store, "-r", str(recipe), "--tokens", "20")
    assert done.returncode == 2 and "was made from target" in done.stderr
