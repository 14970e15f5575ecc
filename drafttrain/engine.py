"""The DeepSpeed engine: process group, optimizer, schedule, ZeRO; the one home of its traps.

What is worked around here, and why:
  - on a CPU the first process group compiles a shared-memory all-reduce that needs a compiler and
    leaves 69 MB per rank in /dev/shm; gloo does the same work, so that operator is switched off;
  - gradients are averaged over ranks and accumulation steps by the engine, while the loss here is
    normalised by the global weight sum: ``loss_scale_for`` undoes the average;
  - torch's AdamW needs no compiled optimizer and is fused on CUDA;
  - gradients that are not finite: ZeRO 1-3 drop the step on all ranks together (their norm is
    reduced), in fp32 and bf16, but leave the schedule behind by one; without ZeRO the step is
    taken all the same and every weight becomes NaN. ``take_step`` makes all stages alike.
"""

import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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

    drafter.recompute = config.activation_checkpointing
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
            # Without ZeRO ``take_step`` clips, since it needs the norm.
            "gradient_clipping": config.clip if config.zero_stage else 0.0,
            "bf16": {"enabled": config.precision == "bf16", "check_grad_overflow": True},
            "zero_optimization": {"stage": config.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine


def take_step(engine: Any, clip: float) -> float:
    """``engine.step()`` after each micro-batch; a step with bad gradients changes nothing.

    Args:
        engine: from ``build_engine``.
        clip: the recipe's.

    Returns:
        The norm of the gradients over all ranks before clipping; 0 before the last micro-batch.
        If it is not finite the step was skipped on every rank: weights and moments keep their
        bits, ``engine.skipped_steps`` has counted it, and the schedule went on.
    """
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return 0.0
    if engine.zero_optimization_stage() == 0:
        norm = float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), clip))
        if not math.isfinite(norm):
            # AdamW passes over weights without a gradient.
            engine.module.zero_grad(set_to_none=True)
            engine.skipped_steps += 1
        engine.step()
        return norm
    engine.step()
    norm = float(engine.get_global_grad_norm())
    applied = engine.was_step_applied()
    assert applied == math.isfinite(norm), f"step taken: {applied}, gradient norm {norm}"
    if not applied:
        engine.lr_scheduler.step()
    return norm


def masters(engine: Any) -> list[Tensor]:
    """The float32 weights that the optimizer updates on this rank: whole, or flat partitions."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return [p.data for p in engine.module.parameters()]
    if stage == 3:
        return [flat.data for flat in engine.optimizer.fp32_partitioned_groups_flat]
    return [flat.data for flat in engine.optimizer.single_partition_of_fp32_groups]


def full_master(engine: Any, parameter: Tensor) -> Tensor:
    """The whole float32 weight of a parameter, put together from all ranks (a collective)."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage() == 0:
        return parameter.data
    return safe_get_full_fp32_param(parameter)


def set_full_master(engine: Any, parameter: Tensor, value: Tensor) -> None:
    """Put this rank's part of a whole float32 weight into its masters."""
    from deepspeed.utils import (
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
        safe_set_local_fp32_param,
    )

    stage = engine.zero_optimization_stage()
    if stage == 0:
        parameter.data.copy_(value)
    elif stage < 3:
        safe_set_full_fp32_param(parameter, value)
    else:
        # Its own setter has no room for the padding of the last rank's part.
        size, rank = safe_get_local_fp32_param(parameter).numel(), dist.get_rank()
        room = size * dist.get_world_size() - value.numel()
        padded = torch.nn.functional.pad(value.flatten(), (0, room))
        safe_set_local_fp32_param(parameter, padded[rank * size : (rank + 1) * size])


def loss_scale_for(engine: Any, world: int) -> float:
    """Factor that turns the engine's mean over ranks and accumulation into a sum."""
    return float(world * engine.gradient_accumulation_steps())
