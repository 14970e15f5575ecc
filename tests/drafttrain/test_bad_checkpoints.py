"""Damaged checkpoints and drafters: one sentence, a non-zero exit, nothing finished destroyed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drafttrain import cli
from drafttrain.checkpoint import MARKER, find_complete, step_folder
from drafttrain.data.files import write_json
from drafttrain.export import save_drafter
from drafttrain.recipe import load_recipe

from .drafter.factory import drafter_config, make_drafter
from .test_recipe import MINIMAL

Damage = Callable[[Path], object]


@pytest.fixture
def run(tmp_path) -> Path:
    """A recipe file whose run holds one complete checkpoint, made without training."""
    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text(yaml.safe_dump(MINIMAL | {"output": str(tmp_path / "run")}))
    recipe = load_recipe(recipe_path)
    folder = step_folder(recipe.checkpoints, 10)
    drafter = make_drafter(drafter_config(4, "sf", 6))
    save_drafter(drafter.config, drafter.state_dict(), folder / "drafter")
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "states.pt").write_bytes(b"x" * 100)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.resolved()))
    files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    write_json(folder / MARKER, {"step": 10, "ranks": 1, "resumable": True, "files": files})
    return recipe_path


def export(run: Path, capsys, monkeypatch, *options: str) -> tuple[int, str]:
    """Run ``drafttrain export`` in this process; returns exit code and stderr."""
    out = run.parent / "exported"
    argv = ["drafttrain", "export", "--recipe", str(run), "--out", str(out), *options]
    monkeypatch.setattr("sys.argv", argv)
    code = 0
    try:
        cli.main()
    except SystemExit as exc:
        code = int(exc.code or 0)
    return code, capsys.readouterr().err


def test_a_whole_checkpoint_exports(run, capsys, monkeypatch):
    """(fault kinds 89, 90)"""
    code, errors = export(run, capsys, monkeypatch)
    assert code == 0, errors
    out = run.parent / "exported"
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "recipe.yaml",
    ]
    notes = (out / "README.md").read_text()
    assert '"num_speculative_tokens": 3' in notes and "--speculative-num-draft-tokens 4" in notes
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in notes  # mixed sliding and full layers
    code, errors = export(run, capsys, monkeypatch)
    assert code == 2 and "is not empty" in errors


def in_drafter(change: Callable[[dict], object]) -> Damage:
    """Edit the drafter's config.json, keeping the marker true."""

    def damage(folder: Path) -> None:
        path = folder / "drafter" / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
        remark(folder)

    return damage


def in_weights(change: Callable[[dict], object]) -> Damage:
    """Edit the drafter's tensors, keeping the marker true."""

    def damage(folder: Path) -> None:
        path = folder / "drafter" / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path)
        remark(folder)

    return damage


def remark(folder: Path) -> None:
    marker = json.loads((folder / MARKER).read_text())
    marker["files"] = {n: (folder / n).stat().st_size for n in marker["files"]}
    write_json(folder / MARKER, marker)


def in_marker(change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path) -> None:
        marker = json.loads((folder / MARKER).read_text())
        change(marker)
        write_json(folder / MARKER, marker)

    return damage


def cut(name: str, size: int = 0) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return damage


def cut_and_remark(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        cut(name, size)(folder)
        remark(folder)

    return damage


NEVER_FINISHED = "holds no complete checkpoint: run `drafttrain train` first"
DAMAGES: list[tuple[str, Damage, str]] = [
    ("marker missing", lambda f: (f / MARKER).unlink(), NEVER_FINISHED),
    ("marker empty", cut(MARKER), NEVER_FINISHED),
    ("marker cut", cut(MARKER, 40), NEVER_FINISHED),
    ("marker a list", lambda f: (f / MARKER).write_text("[]"), NEVER_FINISHED),
    ("marker without files", in_marker(lambda m: m.pop("files")), NEVER_FINISHED),
    ("marker names a missing file", in_marker(lambda m: m["files"].update(x=1)), NEVER_FINISHED),
    ("optimizer state missing", lambda f: shutil.rmtree(f / "deepspeed"), NEVER_FINISHED),
    ("optimizer state empty", cut("deepspeed/states.pt"), NEVER_FINISHED),
    ("weights empty", cut("drafter/model.safetensors"), NEVER_FINISHED),
    ("weights cut", cut("drafter/model.safetensors", 5000), NEVER_FINISHED),
    ("config missing", lambda f: (f / "drafter/config.json").unlink(), NEVER_FINISHED),
    ("all checkpoints gone", shutil.rmtree, NEVER_FINISHED),
    ("a temporary folder only", lambda f: f.rename(f.with_suffix(".tmp")), NEVER_FINISHED),
    ("weights no safetensors", cut_and_remark("drafter/model.safetensors", 3), "cannot be read"),
    ("weights cut, marker true", cut_and_remark("drafter/model.safetensors", 900), "cannot be"),
    ("config no JSON", cut_and_remark("drafter/config.json", 30), "not valid JSON"),
    ("no mask id", in_drafter(lambda c: c["dflash_config"].pop("mask_token_id")), "mask_token_id"),
    ("no taps", in_drafter(lambda c: c["dflash_config"].pop("target_layer_ids")), "target_layer"),
    (
        "no rotary base",
        in_drafter(lambda c: (c.pop("rope_theta"), c.pop("rope_parameters"))),
        "rop",
    ),
    ("two rotary bases", in_drafter(lambda c: c.update(rope_theta=1.5)), "but rope_parameters"),
    ("partial rotary", in_drafter(lambda c: c.update(partial_rotary_factor=0.5)), "partial_rotary"),
    ("other architecture", in_drafter(lambda c: c.update(architectures=["X"])), "architectures is"),
    ("no window", in_drafter(lambda c: c.update(sliding_window=None)), "sliding_window is missing"),
    ("one layer too many", in_drafter(lambda c: c.update(num_hidden_layers=3)), "layer"),
    ("another width", in_drafter(lambda c: c.update(hidden_size=64)), "config.json implies"),
    ("another head", in_drafter(lambda c: c.update(head_dim=8)), "config.json implies"),
    (
        "a tap too many",
        in_drafter(lambda c: c["dflash_config"]["target_layer_ids"].append(4)),
        "fc",
    ),
    ("a tensor missing", in_weights(lambda w: w.pop("norm.weight")), "tensors missing, first norm"),
    ("a tensor misnamed", in_weights(lambda w: w.update(nrm=w.pop("norm.weight"))), "missing"),
    ("a tensor too many", in_weights(lambda w: w.update(x=torch.ones(1))), "unexpected tensors"),
    ("a tensor misshapen", in_weights(lambda w: w.update({"norm.weight": torch.ones(3)})), "shape"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_a_damaged_checkpoint_is_one_sentence_and_exit_code_2(
    run, damage, message, capsys, monkeypatch
):
    """(fault kinds 56, 57, 66, 85, 87)"""
    folder = step_folder(run.parent / "run" / "checkpoints", 10)
    damage(folder)
    code, errors = export(run, capsys, monkeypatch)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2 and message in line and str(run.parent) in line
    assert "Traceback" not in errors
    assert not (run.parent / "exported").exists()


def test_the_newest_whole_checkpoint_is_chosen(run):
    root = run.parent / "run" / "checkpoints"
    for step in (20, 30):
        shutil.copytree(step_folder(root, 10), step_folder(root, step))
    (step_folder(root, 30) / "deepspeed" / "states.pt").write_bytes(b"")
    shutil.copytree(step_folder(root, 10), root / "step-000040.tmp")
    assert find_complete(root, resumable=True) == step_folder(root, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "nowhere"], "nowhere is neither a checkpoint nor a drafter folder"),
        (["train.lrr=3"], "train.lrr: unknown key"),
    ],
)
def test_bad_options(run, options, message, capsys, monkeypatch):
    code, errors = export(run, capsys, monkeypatch, *options)
    assert code == 2 and message in errors
