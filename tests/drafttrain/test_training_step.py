"""The optimizer step on two real ranks, under every ZeRO stage, against plain PyTorch on one."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from drafttrain.drafter.masks import layer_masks
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.parallel import block_embeddings
from drafttrain.engine import lr_factor
from drafttrain.export import expected_shapes
from drafttrain.launch import free_port
from drafttrain.training_step import TrainingStep

from ..e2e.conftest import ENVIRONMENT
from . import step_worker
from .drafter.factory import make_drafter, make_head
from .step_worker import CASES, CONFIG, DECAY, EMPTY, INFINITE, MOMENTS, POISONED, SAVED, STEPS

pytestmark = pytest.mark.xdist_group("training")
KEPT = ("weights", "computed", "average", *MOMENTS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[int, str], dict[str, Any]]:
    """What two ranks saw of every case; one launch for all."""
    folder = tmp_path_factory.mktemp("steps")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.drafttrain.step_worker", str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            env={**ENVIRONMENT, **shared, "RANK": rank, "LOCAL_RANK": rank},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    found = {
        case: torch.load(folder / f"{case[0]}-{case[1]}.pt", weights_only=False) for case in CASES
    }
    for case in CASES:
        found[case]["output"] = outputs
    return found


@pytest.fixture(params=CASES, ids=[f"zero{stage}-{precision}" for stage, precision in CASES])
def case(request, runs) -> dict[str, Any]:
    stage, precision = request.param
    return runs[request.param] | {"stage": stage, "precision": precision}


def plain_gradients(drafter: Drafter, step: int) -> dict[str, torch.Tensor] | None:
    """Gradients of all micro-batches at once: full logits, one sum, one division."""
    head, total, weights = make_head(), torch.zeros(()), 0.0
    for batch in [b for rank in (0, 1) for b in step_worker.scripted_step(step, rank)]:
        embeds = block_embeddings(head, batch.anchor_ids, CONFIG.block_size, CONFIG.mask_token_id)
        masks = layer_masks(batch.layout, CONFIG.layer_types, CONFIG.sliding_window)
        layout = batch.layout
        taps = batch.taps.decode()
        hidden = drafter(taps, layout.context_pos, embeds, layout.block_pos, masks)
        slots = hidden.unflatten(1, (-1, CONFIG.block_size))[:, :, 1:]
        losses = torch.nn.functional.cross_entropy(
            head.logits(slots).flatten(0, 2), batch.labels.flatten(), reduction="none"
        ).view(batch.labels.shape)
        decay = torch.tensor([1.0, 2.718281828 ** (-1 / 2.0), 2.718281828 ** (-2 / 2.0)])
        weight = batch.supervised * decay
        total = total + (losses * weight).sum()
        weights += weight.sum().item()
    drafter.zero_grad()
    (total / weights if weights else total * 0.0).backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters()}


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """The same training in plain PyTorch, in float32 on one rank."""
    drafter = make_drafter(CONFIG, 0).train()
    train = step_worker.make_recipe(Path("unused"), 0, "fp32").train
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=train.lr, betas=(0.9, 0.999), weight_decay=train.weight_decay
    )
    average = {name: w.clone() for name, w in drafter.state_dict().items()}
    seen = []
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = train.lr * lr_factor(step - 1, STEPS, train.warmup)
        gradients = None
        if step not in (POISONED, INFINITE):
            gradients = plain_gradients(drafter, step)
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), train.clip)
            optimizer.step()
            decay = min(DECAY, (1 + step) / (10 + step))
            for name, weight in drafter.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * weight
        weights = {name: w.clone() for name, w in drafter.state_dict().items()}
        seen.append({"gradients": gradients, "weights": weights, "average": dict(average)})
    return seen


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert ours.keys() == theirs.keys()
    off = sum((ours[n].double() - theirs[n].double()).square().sum() for n in ours)
    return (off / sum(w.double().square().sum() for w in theirs.values())).sqrt().item()


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any], kinds=KEPT) -> None:
    for kind in kinds:
        assert ours[kind].keys() == theirs[kind].keys()
        for name, tensor in theirs[kind].items():
            assert torch.equal(ours[kind][name], tensor), (kind, name)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_weights_and_average_are_those_of_one_rank(runs, plain, stage):
    """3 labels on one rank and 300 on the other; a rank without any; none anywhere.

    (fault kind 54)
    """
    case = runs[stage, "fp32"]
    labels = [sum(int(b.supervised.sum()) for b in step_worker.scripted_step(1, r)) for r in (0, 1)]
    assert labels == [3, 300]
    for step, (ours, theirs) in enumerate(zip(case["seen"], plain, strict=True), start=1):
        if step == EMPTY:
            assert not any(g.any() for g in ours["gradients"].values())
            assert ours["found"]["loss"] == ours["found"]["grad_norm"] == 0.0
        elif step not in (POISONED, INFINITE):
            # Later ones are taken at weights that differ by the rounding before.
            bound = 1e-6 if step == 1 else 2e-5
            assert distance(ours["gradients"], theirs["gradients"]) < bound, step
        assert distance(ours["weights"], theirs["weights"]) < 1e-5, step
        assert distance(ours["average"], theirs["average"]) < 1e-5, step
    # The reference moves enough to be told apart from one that does not.
    assert distance(plain[0]["average"], plain[0]["weights"]) > 1e-3
    assert distance(plain[-1]["weights"], plain[0]["weights"]) > 1e-2


def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(case):
    """A poisoned sample, and an infinite gradient behind finite losses (fault kind 52)."""
    for step in (POISONED, INFINITE):
        before, after = case["seen"][step - 2], case["seen"][step - 1]
        assert_same_bits(after, before)
        assert all(after[m][n].any() for m in MOMENTS for n in after[m])
        assert math.isfinite(after["found"]["loss"]) == (step == INFINITE)
        assert not math.isfinite(after["found"]["grad_norm"])
    skipped = [seen["found"]["skipped_steps"] for seen in case["seen"]]
    assert skipped == [0, 0, 1, 1, 2, 2]
    factors = [seen["lr"] / 0.01 for seen in case["seen"]]
    assert factors == pytest.approx([lr_factor(s, STEPS, 0.2) for s in range(1, STEPS + 1)])
    for output in case["output"]:
        assert "step 3 skipped, weights unchanged: 1 of 4 losses are not finite" in output
        assert "rank 0: sample-30;" in output and "rank 1 (not finite): sample-33" in output
        assert "step 5 skipped, weights unchanged: all losses are finite" in output
        assert "rank 0: sample-50;" in output and "rank 1: sample-53" in output


def test_resuming_goes_on_bit_for_bit_with_masters_in_float32(case):
    """The average too; without running layers again, bits are the same (fault kinds 50, 63)."""
    seen = case["seen"]
    assert case["dtypes"] == {torch.float32}
    assert_same_bits(case["loaded"], seen[SAVED - 1], KEPT[:3])
    for ours, theirs in zip(case["resumed"], seen[SAVED:], strict=True):
        assert_same_bits(ours, theirs)
        assert ours["found"]["loss"] == theirs["found"]["loss"]
        assert ours["lr"] == theirs["lr"]


def test_exports_hold_every_weight_or_its_average(case):
    """(fault kind 63)"""
    saved, plain = (load_file(f / "drafter" / "model.safetensors") for f in case["folders"])
    last, dtype = case["seen"][-1], next(iter(case["seen"][-1]["computed"].values())).dtype
    assert dtype == (torch.bfloat16 if case["precision"] == "bf16" else torch.float32)
    assert plain.keys() == saved.keys() == expected_shapes(CONFIG).keys()
    average = case["seen"][SAVED - 1]["average"]
    for name in plain:
        assert torch.equal(plain[name], last["computed"][name]), name
        assert torch.equal(plain[name], last["weights"][name].to(dtype)), name
        assert torch.equal(saved[name], average[name].to(dtype)), name
    assert not (case["folders"][1] / "deepspeed" / "ema.safetensors").exists()


def test_the_optimizer_holds_the_drafter_and_nothing_else(case):
    """(fault kind 55)"""
    copies = 2 if case["stage"] == 0 else 1  # without ZeRO every rank holds all
    padding = case["owned"] - copies * case["parameters"]
    assert 0 <= padding < 200


def test_norm_weights_move(case):
    """(fault kind 50)"""
    first = make_drafter(CONFIG, 0).state_dict()
    for last in (case["seen"][-1], case["resumed"][-1]):
        norms = [n for n in first if first[n].dim() == 1]
        total = sum(first[n].numel() for n in norms)
        assert sum((last["weights"][n] == first[n]).sum().item() for n in norms) < 0.01 * total
        # And by less than bfloat16 could keep.
        rounded = {n: last["weights"][n].bfloat16().float() for n in norms}
        assert sum((last["weights"][n] == rounded[n]).sum().item() for n in norms) < 0.05 * total


class OneHidden:
    """An engine whose drafter is a single vector, and no optimizer at all."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(32, 1, bias=False)
        torch.nn.init.constant_(self.module.weight, 1e21)
        self.skipped_steps = 0
        self.seen: list[float] = []

    def __call__(self, taps, positions, embeds, *_) -> torch.Tensor:
        return self.module.weight.expand(embeds.shape)

    def backward(self, loss: torch.Tensor) -> None:
        self.seen.append(loss.item())
        loss.backward()

    def step(self) -> None:
        self.left = self.module.weight.grad

    def gradient_accumulation_steps(self) -> int:
        return 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def zero_optimization_stage(self) -> int:
        return 0


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_infinite_loss_with_finite_gradients_skips_the_step_too(alone):
    batch = step_worker.scripted_step(6, 0)[0]
    lm_head = torch.zeros_like(make_head().lm_head)
    label = batch.labels[batch.supervised][0]
    lm_head[label] = -1e17  # its logit is minus infinity, the gradient 1e17
    head = dataclasses.replace(make_head(), lm_head=lm_head)
    train = step_worker.make_recipe(Path("unused"), 0, "fp32").train
    engine = OneHidden()
    found = TrainingStep(engine, head, CONFIG, 2.0, train, None).take(1, [batch])
    assert found["loss"] == math.inf and math.isnan(found["grad_norm"])
    assert math.isnan(engine.seen[0]) and engine.left is None and engine.skipped_steps == 1
