"""One rank of a scripted training: every ZeRO stage in turn, everything seen of it kept in files.

    python step_worker.py FOLDER    started as by a launcher; writes FOLDER/<stage>-<precision>.pt

The steps are those of ``scripted_step``; ``test_training_step.py`` compares what is seen with a
slow reference. After step 3 a checkpoint is written, from which a second engine goes on.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drafttrain.batches import Batch, make_batch
from drafttrain.checkpoint import full_weights, load_state, save_checkpoint
from drafttrain.ema import WeightAverage
from drafttrain.engine import build_engine, full_master, init_distributed, masters
from drafttrain.recipe import Recipe
from drafttrain.training_step import TrainingStep

from .drafter.factory import drafter_config, make_drafter, make_head, make_sample
from .test_recipe import MINIMAL

CASES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")]
STEPS, SAVED = 6, 3
POISONED, EMPTY, INFINITE = 3, 4, 5
CONFIG = drafter_config(4, "f")
GAMMA, DECAY = 2.0, 0.3


def scripted_sample(step: int, place: int):
    """The sample of one of the four micro-batches of a step (two ranks, two each).

    Slots with a label, by step: 3 on rank 0 and 300 on rank 1 (one micro-batch has none); none on
    rank 0; one micro-batch of rank 1 poisoned; none anywhere; sound (but see ``go``); uneven.
    """
    supervised = {
        1: (3, 0, 52, 52),
        2: (0, 0, 9, 4),
        3: (6, 7, 8, 9),
        4: (0, 0, 0, 0),
        5: (3, 4, 5, 6),
        6: (3, 20, 2, 6),
    }[step][place]
    sample = make_sample(supervised + 8, seed=10 * step + place, supervised_from=8)
    if step == POISONED and place == 3:
        # As large as a float32 can be: what the drafter makes of it overflows.
        sample.encoded_taps.parts[""][4] = 3e38
    return sample


def scripted_step(step: int, rank: int) -> list[Batch]:
    return [
        make_batch(
            [(0, scripted_sample(step, place))],
            seed=0,
            anchors=100,
            block_size=CONFIG.block_size,
            packing=False,
        )
        for place in (2 * rank, 2 * rank + 1)
    ]


def make_recipe(folder: Path, stage: int, precision: str, **changes: Any) -> Recipe:
    train = {
        "global_batch": 4,
        "micro_batch": 1,
        "precision": precision,
        "zero_stage": stage,
        "checkpoint_every": 1,
        "lr": 0.01,
        "warmup": 0.2,
        "weight_decay": 0.1,
        "clip": 0.5,
        "ema": DECAY,
        "activation_checkpointing": True,
    }
    return Recipe.model_validate(MINIMAL | {"output": str(folder), "train": train | changes})


class Run:
    """One engine, its step, and what is seen of them."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        drafter = make_drafter(CONFIG, seed).train()
        self.parameters = sum(p.numel() for p in drafter.parameters())
        dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
        self.engine = build_engine(drafter, recipe.train, STEPS, dist.get_world_size())
        self.average = WeightAverage(self.engine, DECAY)
        head = make_head().to(torch.device("cpu"), dtype)
        self.step = TrainingStep(self.engine, head, CONFIG, GAMMA, recipe.train, self.average)
        self.gradients: dict[str, torch.Tensor] = {}
        self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        from deepspeed.utils import safe_get_full_grad

        backward = self.engine.backward

        def backward_and_look(loss: torch.Tensor) -> None:
            backward(loss)
            if self.engine.is_gradient_accumulation_boundary():
                named = self.named().items()
                self.gradients = {n: safe_get_full_grad(p).float().clone() for n, p in named}

        self.engine.backward = backward_and_look

    def named(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def state(self) -> dict[str, Any]:
        """Weights and average of the whole drafter."""
        return {
            "weights": {n: full_master(self.engine, p).clone() for n, p in self.named().items()},
            "computed": {n: w.clone() for n, w in full_weights(self.engine).items()},
            "average": self.average.full(),
        }

    def moments(self) -> dict[str, Any]:
        """Of the whole drafter; there are none before the first step, nor right after loading."""
        from deepspeed.utils import safe_get_full_optimizer_state

        def moment(parameter, key: str) -> torch.Tensor:
            if self.engine.zero_optimization_stage() == 0:
                return self.engine.optimizer.state[parameter][key].clone()
            return safe_get_full_optimizer_state(parameter, key).clone()

        return {key: {n: moment(p, key) for n, p in self.named().items()} for key in MOMENTS}

    def go(self, first: int, last: int) -> list[dict[str, Any]]:
        seen = []
        for number in range(first, last + 1):
            hooks = []
            if number == INFINITE and dist.get_rank() == 0:
                weight = self.engine.module.fc.weight
                hooks.append(weight.register_hook(lambda grad: grad.fill_(torch.inf)))
            found = self.step.take(number, scripted_step(number, dist.get_rank()))
            for hook in hooks:
                hook.remove()
            seen.append(
                {
                    "found": found,
                    "gradients": self.gradients,
                    "lr": self.engine.lr_scheduler.get_last_lr()[0],
                    **self.state(),
                    **self.moments(),
                }
            )
        return seen


MOMENTS = ("exp_avg", "exp_avg_sq")


def scripted_run(folder: Path, stage: int, precision: str) -> dict[str, Any]:
    recipe = make_recipe(folder / f"{stage}-{precision}", stage, precision)
    run = Run(recipe, seed=0)
    assert run.engine.module.recompute
    seen = run.go(1, SAVED)
    saved = save_checkpoint(run.engine, CONFIG, recipe, SAVED, run.average)
    seen += run.go(SAVED + 1, STEPS)
    plain = save_checkpoint(run.engine, CONFIG, recipe, STEPS)
    other = Run(make_recipe(recipe.output, stage, precision, activation_checkpointing=False), 1)
    assert not other.engine.module.recompute
    assert load_state(other.engine, saved, recipe, other.average) == SAVED
    loaded = other.state()
    resumed = other.go(SAVED + 1, STEPS)
    owned = torch.tensor([sum(m.numel() for m in masters(run.engine))])
    dist.all_reduce(owned)
    return {
        "seen": seen,
        "loaded": loaded,
        "resumed": resumed,
        "folders": (saved, plain),
        "parameters": run.parameters,
        "owned": owned.item(),
        "dtypes": {m.dtype for m in masters(other.engine)},
    }


def main() -> None:
    init_distributed()
    folder = Path(sys.argv[1])
    for stage, precision in CASES:
        result = scripted_run(folder, stage, precision)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{stage}-{precision}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
