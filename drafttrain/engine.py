"""The DeepSpeed engine: process group, optimizer, schedule, ZeRO; the one home of its traps.

What is worked around here, and why:
  - on a CPU the first process group compiles a shared-memory all-reduce that needs a compiler and
    leaves 69 MB per rank in /dev/shm; gloo does the same work, so that operator is switched off;
  - gradients are averaged over ranks and accumulation steps by the engine, while the loss here is
    normalised by the global weight sum: ``loss_scale_for`` undoes the average;
  - torch's AdamW needs no compiled optimizer and is fused on CUDA.
"""

import math
import os
from datetime import timedelta
from typing import Any

import torch

from .drafter.model import Drafter
from .train_config import TrainConfig

# Nothing long runs on one rank alone, so a silent peer this old is dead.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def init_distributed() -> torch.device:
    """Join the process group that the launcher describes; return this rank's device."""
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    if not cuda:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if cuda else "gloo", timeout=_COLLECTIVE_TIMEOUT, verbose=False
    )
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def lr_factor(step: int, total: int, warmup: float) -> float:
    """Linear warm-up over ``warmup`` of the steps, then cosine to 0 at ``total``."""
    ramp = max(1, round(warmup * total))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - ramp) / max(1, total - ramp))))


def accumulation_steps(config: TrainConfig, world: int) -> int:
    """Micro-batches per rank and optimizer step.

    Raises:
        RecipeError: when the global batch cannot be split evenly over the ranks.
    """
    from drafttrain.data.errors import RecipeError

    per_step = world * config.micro_batch
    if config.global_batch % per_step:
        raise RecipeError(
            f"train.global_batch {config.global_batch} cannot be split over {world} ranks with "
            f"train.micro_batch {config.micro_batch}: it must be a multiple of {per_step}"
        )
    return config.global_batch // per_step


def build_engine(drafter: Drafter, config: TrainConfig, total_steps: int, world: int) -> Any:
    """Wrap the drafter (and only the drafter: the head stays frozen outside) in DeepSpeed."""
    import deepspeed

    optimizer = torch.optim.AdamW(
        drafter.parameters(),
        lr=config.lr,
        betas=(0.9, 0.999),
        weight_decay=config.weight_decay,
        fused=torch.cuda.is_available(),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps, config.warmup)
    )
    engine, *_ = deepspeed.initialize(
        model=drafter,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={
            "train_batch_size": config.global_batch,
            "train_micro_batch_size_per_gpu": config.micro_batch,
            "gradient_accumulation_steps": accumulation_steps(config, world),
            "gradient_clipping": config.clip,
            "bf16": {"enabled": config.precision == "bf16"},
            "zero_optimization": {"stage": config.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine


def take_step(engine: Any) -> float:
    """``engine.step()``; returns the gradient norm before clipping (on accumulation boundaries)."""
    norm = None
    if engine.zero_optimization_stage() == 0 and engine.is_gradient_accumulation_boundary():
        # Without ZeRO the engine clips but keeps no norm.
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
    engine.step()
    norm = engine.get_global_grad_norm() if norm is None else norm
    return float(norm or 0.0)


def loss_scale_for(engine: Any, world: int) -> float:
    """Factor that turns the engine's mean over ranks and accumulation into a sum."""
    return float(world * engine.gradient_accumulation_steps())
