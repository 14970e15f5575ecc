"""Exponential moving average of the weights, in float32, beside the optimizer's masters.

    average <- d * average + (1 - d) * masters      d = min(decay, (1 + t) / (10 + t)) after step t

Every rank averages what it owns of the masters, so a step costs one pass over them and no
communication, and their bytes once more. The smaller d of the first steps forgets the random start.
Whole weights are put together through the masters' own place: the average is exchanged with them,
read as they are read, and exchanged back. The file holds whole weights, whatever the ranks.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.data.errors import CheckpointError

from .engine import full_master, masters, set_full_master

EMA_FILE = "ema.safetensors"


class WeightAverage:
    """The average of one engine's weights; starts as a copy of them.

    Args:
        engine: the drafter in DeepSpeed.
        decay: of a long run.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self._averages = [master.clone() for master in masters(engine)]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step ``step``, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for average, master in zip(self._averages, masters(self._engine), strict=True):
            average.lerp_(master, 1 - decay)

    @torch.no_grad()
    def full(self) -> dict[str, Tensor]:
        """The whole average, float32 on the host, by name (a collective)."""
        named = self._engine.module.named_parameters()
        self._exchange()
        try:
            return {name: full_master(self._engine, p).cpu().clone() for name, p in named}
        finally:
            self._exchange()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continue from ``EMA_FILE`` in a checkpoint's state folder.

        Raises:
            CheckpointError: it is missing, unreadable, or of another drafter.
        """
        path = folder / EMA_FILE
        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(
                f"{path} cannot be read ({exc}): choose another checkpoint"
            ) from None
        named = dict(self._engine.module.named_parameters())
        if weights.keys() != named.keys():
            raise CheckpointError(f"{path} is of another drafter: choose another checkpoint")
        self._exchange()
        try:
            for name, parameter in named.items():
                set_full_master(self._engine, parameter, weights[name].to(parameter.device))
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Swap averages and masters."""
        for average, master in zip(self._averages, masters(self._engine), strict=True):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
