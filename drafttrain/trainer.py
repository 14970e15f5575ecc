"""The training loop: feature store -> drafter checkpoints, one DeepSpeed process per rank.

    step s:  N samples of the global order -> micro-batches (batches) -> one optimizer step
             (training_step) -> log (step_report), now and then a checkpoint and its evaluation

Guarantees: the order, the anchors and the initial weights depend on the recipe's seed alone, so a
run that was killed and started again, or split over other ranks, follows the same trace (bit for
bit on the same ranks, to rounding on others). The target is never loaded.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drafttrain.data.errors import RecipeError
from drafttrain.data.files import content_hash, write_text
from drafttrain.data.order import sample_at

from .batches import Batch, make_batch
from .checkpoint import find_complete, load_state, prune, save_checkpoint
from .drafter.model import Drafter
from .drafter.resolve import resolve_config
from .ema import WeightAverage
from .engine import accumulation_steps, build_engine
from .export import load_drafter
from .features import open_features, training_steps
from .losses.weights import resolve_gamma
from .metrics_log import check_loggers
from .recipe import Recipe
from .step_metrics import utilisation
from .step_report import StepReport
from .training_step import TrainingStep

log = logging.getLogger(__name__)

# Tile size of flex_attention; rows are rounded up to it, on a CPU padding would only cost.
_CUDA_MULTIPLE = 128

# Called with (checkpoint folder, step) after each checkpoint, on every rank.
AfterCheckpoint = Callable[[Path, int], dict[str, float]]


class Trainer:
    """Everything one rank holds while training.

    Args:
        recipe: the whole recipe.
        device: this rank's device.
        after_checkpoint: evaluation of a finished checkpoint; its numbers are logged.
    """

    def __init__(
        self, recipe: Recipe, device: torch.device, after_checkpoint: AfterCheckpoint
    ) -> None:
        self.recipe, self.device, self.after_checkpoint = recipe, device, after_checkpoint
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        train = recipe.train
        check_loggers(train.loggers)
        self.micro_batches = accumulation_steps(train, self.world)
        self.features = open_features(recipe, device, self.rank)
        lengths = self.features.lengths
        self.total_steps = training_steps(recipe, len(lengths))
        self.config = resolve_config(recipe.drafter, self.features.meta).model_copy(
            update={"trained_length": int(lengths.max())}
        )
        self.gamma = resolve_gamma(train.gamma, self.config.block_size)
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        head = self.features.head.to(device, dtype)
        self.engine = build_engine(self._new_drafter(), train, self.total_steps, self.world)
        self.average = None if train.ema is None else WeightAverage(self.engine, train.ema)
        self.training_step = TrainingStep(
            self.engine,
            head,
            self.config,
            self.gamma,
            train,
            self.average,
        )

    def run(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        done = self._resume()
        if done >= self.total_steps:
            log.info("training is finished already: %d steps", done)
            self._release(done)
            return
        if self.rank == 0:
            self._announce(done)
        report = StepReport(self.recipe, done, self.total_steps, enabled=self.rank == 0)
        with ThreadPoolExecutor(1) as loader, report:
            self._release(done)
            upcoming = loader.submit(self._load, done)
            for step in range(done, self.total_steps):
                start = time.perf_counter()
                batches = upcoming.result()
                waited = time.perf_counter() - start
                if not self._last(step):
                    upcoming = loader.submit(self._load, step + 1)
                line = self._step(step, batches, waited)
                self._release(step + 1)
                if self.rank == 0:
                    report.step(line | {"samples": self._drawn(step)})
                if (step + 1) % self.recipe.train.checkpoint_every == 0 or self._last(step):
                    report.scalars(step + 1, self._checkpoint(step + 1))

    def time_steps(self, seconds: float) -> float:
        """Tokens per second of all ranks, over real steps of about so long; nothing is written."""
        took = torch.zeros(1, device=self.device)
        for step in range(2):  # the first compiles
            start = time.perf_counter()
            self._step(step, self._load(step), 0.0)
            took.fill_(time.perf_counter() - start)
        dist.broadcast(took, 0)  # so that all ranks do as many steps
        tokens = spent = 0.0
        for step in range(2, 3 + int(seconds / took.item())):
            start = time.perf_counter()
            batches = self._load(step)
            loaded = time.perf_counter() - start
            line = self._step(step, batches, loaded)
            tokens += line["tokens_per_s"] * line["step_s"]
            spent += max(loaded, line["step_s"])  # training loads while it computes
        return tokens / spent

    def _new_drafter(self) -> Drafter:
        init = self.recipe.drafter.init
        if init is None:
            return Drafter(self.config).init_weights(self.recipe.seed)
        drafter = load_drafter(Path(init), torch.device("cpu"), torch.float32)
        if names := drafter.config.differences(self.config):
            raise RecipeError(
                f"drafter.init {init} differs from the recipe and target in {', '.join(names)}"
            )
        return drafter.train()

    def _resume(self) -> int:
        folder = find_complete(self.recipe.checkpoints, resumable=True)
        if folder is None:
            return 0
        done = load_state(self.engine, folder, self.recipe, self.average)
        log.info("continuing from %s (%d of %d steps)", folder, done, self.total_steps)
        return done

    def _announce(self, done: int) -> None:
        recipe, count = self.recipe, sum(p.numel() for p in self.engine.module.parameters())
        write_text(recipe.output / "drafter_config.json", self.config.model_dump_json(indent=2))
        log.info(
            "%d steps of %d samples (%d left), %s parameters, %d ranks x %d micro-batches of "
            "%d, ZeRO %d, %s, slot decay gamma %g",
            self.total_steps,
            recipe.train.global_batch,
            self.total_steps - done,
            f"{count:,}",
            self.world,
            self.micro_batches,
            recipe.train.micro_batch,
            recipe.train.zero_stage,
            recipe.train.precision,
            self.gamma,
        )

    def _positions(self, step: int) -> range:
        size = self.recipe.train.global_batch
        return range(step * size, (step + 1) * size)

    def _mine(self, step: int) -> range:
        """This rank's part of them."""
        positions = self._positions(step)
        share = len(positions) // self.world
        return positions[self.rank * share : (self.rank + 1) * share]

    def _release(self, done: int) -> None:
        """Every rank has read the samples of the steps that are done: they reduced together."""
        self.features.release(self._positions(done)[0])

    def _load(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the host (on the device if made there)."""
        train, mine = self.recipe.train, self._mine(step)
        self.features.wait(self._positions(step))
        self.features.prefetch([*mine, *([] if self._last(step) else self._mine(step + 1))])
        return [
            make_batch(
                self.features.read(mine[first : first + train.micro_batch]),
                seed=self.recipe.seed,
                anchors=train.anchors,
                block_size=self.config.block_size,
                packing=train.packing,
                multiple=_CUDA_MULTIPLE if self.device.type == "cuda" else 1,
            )
            for first in range(0, len(mine), train.micro_batch)
        ]

    def _step(self, step: int, batches: list[Batch], waited: float) -> dict[str, Any]:
        """One optimizer step; returns the log line."""
        start = time.perf_counter()
        found = self.training_step.take(step + 1, batches)
        seconds = time.perf_counter() - start
        size, bf16 = self.recipe.train.global_batch, self.recipe.train.precision == "bf16"
        return {
            "step": step + 1,
            "epoch": round((step + 1) * size / len(self.features.lengths), 4),
            "lr": self.engine.lr_scheduler.get_last_lr()[0],
            "tokens_per_s": found.pop("tokens") / seconds,
            "step_s": seconds,
            "mfu": utilisation(found.pop("flops"), seconds, self.world, bf16),
            "data_wait_s": waited,
            **found,
        }

    def _drawn(self, step: int) -> str:
        """Hash of the samples of a step, for the log."""
        count, seed = len(self.features.lengths), self.recipe.seed
        drawn = [sample_at(count, seed, place)[1] for place in self._positions(step)]
        return content_hash([self.features.sample_id(index) for index in drawn])

    def _last(self, step: int) -> bool:
        return step + 1 == self.total_steps

    def _checkpoint(self, step: int) -> dict[str, float]:
        """Write one; returns the numbers of its evaluation."""
        folder = save_checkpoint(self.engine, self.config, self.recipe, step, self.average)
        if self.rank == 0:
            prune(self.recipe.checkpoints, self.recipe.train.keep_checkpoints)
        return self.after_checkpoint(folder, step)
