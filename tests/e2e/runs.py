"""Training runs as launchers start them, and what must be equal between two of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from drafttrain.launch import TRAIN_SCRIPT, free_port
from drafttrain.metrics_log import read_metrics

from .conftest import ENVIRONMENT


def train_command(recipe: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(TRAIN_SCRIPT), "--recipe", str(recipe), *overrides]


def start_rank(
    recipe: Path, *overrides: str, rank: int = 0, world: int = 1, port: int | None = None
) -> subprocess.Popen:
    """One rank in its own session, as a launcher starts it (without the launcher's import time)."""
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
    }
    return subprocess.Popen(
        train_command(recipe, *overrides),
        env={**ENVIRONMENT, **place},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_ranks(recipe: Path, *overrides: str, world: int) -> list[subprocess.Popen]:
    """All ranks of a run."""
    port = free_port()
    return [
        start_rank(recipe, *overrides, rank=rank, world=world, port=port) for rank in range(world)
    ]


def copy_run(extracted: Path, folder: Path, **train) -> Path:
    """The extracted run under a new output folder; the stores are shared read-only by copy."""
    recipe = yaml.safe_load(extracted.read_text())
    shutil.copytree(recipe["output"], folder / "run")
    recipe["output"] = str(folder / "run")
    recipe["train"].update(train)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def trace(recipe: Path) -> list[tuple]:
    """What must be equal between runs: loss, learning rate, gradient norm, samples of each step."""
    lines = read_metrics(Path(yaml.safe_load(recipe.read_text())["output"]) / "metrics.jsonl")
    return [(m["step"], m["loss"], m["lr"], m["grad_norm"], m["samples"]) for m in lines]
