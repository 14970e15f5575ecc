"""The script that trains a small hybrid target makes one that the pipeline takes."""

import subprocess
import sys
from pathlib import Path

import yaml

from drafttrain.acceptance.session import TargetSession
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.target import load_target

ROOT = Path(__file__).parents[2]


def test_a_few_steps_make_a_hybrid_that_loads_and_verifies(tmp_path):
    text = tmp_path / "few.jsonl"
    lines = (ROOT / "recipes/quickstart/conversations/train.jsonl").read_text().splitlines()
    text.write_text("\n".join(lines[:40]))
    command = [sys.executable, "recipes/hybrid/train_target.py", "--out", str(tmp_path / "out"),
               "--text", str(text), "--steps", "2", "--hidden", "64"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    target = load_target(TargetConfig(path=str(tmp_path / "out"), dtype="float32", device="cpu"))
    session = TargetSession(target, [1, 2])  # runs its trial
    assert session._recurrent is not None
    assert target.rope_theta == 1e7 and len(target.stop_ids) == 2
    recipe = yaml.safe_load((ROOT / "recipes/hybrid.yaml").read_text())
    mask = recipe["drafter"]["mask_token_id"]
    assert len(target.tokenizer) <= mask < target.vocab_rows


def test_a_missing_text_is_named(tmp_path):
    command = [sys.executable, "recipes/hybrid/train_target.py", "--out", str(tmp_path),
               "--text", "nowhere.jsonl"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere.jsonl" in done.stderr
