"""The stages of a run as rows: tokens, bytes and files, done and left, and the hours they take.

Hours are tokens left over a rate that was given or measured; without one they are None, never a
guess. GPU-hours are of one device, wall time divides them by the devices that share the work.
"""

from collections import Counter
from dataclasses import dataclass

from drafttrain.acceptance.tree import methods_of
from drafttrain.checkpoint import find_complete, step_of
from drafttrain.data.samples import SampleTable
from drafttrain.extract.plan import StorePlan
from drafttrain.recipe import Recipe

from .needs import CheckpointNeeds
from .space import folder_bytes

_FILES_PER_DRAFTER = 4  # config.json, model.safetensors, recipe.yaml, COMPLETE.json


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one device, and who says so: "given" or "probe"."""

    tokens_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One row of the plan.

    Attributes:
        tokens: through the target (extraction, live) or the drafter (training, replay).
        bytes_left: still to be written.
        files: of the finished stage, those of optimizer states not counted.
        rate: of one device; None where neither given nor measured.
        devices: that share the work.
    """

    name: str
    tokens: int
    tokens_left: int
    bytes_done: int = 0
    bytes_left: int = 0
    files: int = 0
    rate: Rate | None = None
    devices: int = 1

    @property
    def gpu_hours(self) -> float | None:
        """Hours of one device for what is left; 0 if nothing is."""
        if self.tokens_left == 0:
            return 0.0
        return None if self.rate is None else self.tokens_left / self.rate.tokens_per_s / 3600

    @property
    def wall_hours(self) -> float | None:
        """Hours from start to end on ``devices``."""
        return None if self.gpu_hours is None else self.gpu_hours / self.devices


def plan_stages(
    recipe: Recipe,
    tables: dict[str, SampleTable],
    stores: dict[str, StorePlan],
    checkpoints: CheckpointNeeds,
    rates: dict[str, Rate],
    devices: int,
) -> list[StagePlan]:
    """The rows of a run, in the order in which they happen.

    Args:
        recipe: of the run.
        tables: sample table per split.
        stores: what is sealed and what is left, per split that is stored.
        checkpoints: of the whole run.
        rates: of ``extract``, ``train``, ``replay`` and ``live``; what is missing is unknown.
        devices: GPUs that extract and train; live decoding is one process.
    """
    rows = [_prepared(recipe, tables)]
    for split, store in stores.items():
        rows.append(
            StagePlan(
                f"extract {split}",
                store.tokens,
                store.tokens - store.tokens_done,
                store.bytes_done,
                store.bytes_left,
                store.files,
                rates.get("extract"),
                devices,
            )
        )
    rows += _training(recipe, tables, checkpoints, rates, devices)
    rows.append(_live(recipe, tables["eval"], rates))
    return rows


def _prepared(recipe: Recipe, tables: dict[str, SampleTable]) -> StagePlan:
    tokens = sum(int(table.lengths.sum()) for table in tables.values())
    folder = recipe.output / "samples"
    files = sum(path.is_file() for path in folder.iterdir())
    return StagePlan("prepare", tokens, 0, bytes_done=folder_bytes(folder), files=files)


def _training(
    recipe: Recipe,
    tables: dict[str, SampleTable],
    needs: CheckpointNeeds,
    rates: dict[str, Rate],
    devices: int,
) -> list[StagePlan]:
    """Training, and the replay that every checkpoint gets; both go on from the newest one."""
    train, table = recipe.train, tables["train"]
    newest = find_complete(recipe.checkpoints, resumable=True)
    done = step_of(newest) if newest else 0
    steps = train.steps(len(table))
    per_step = train.global_batch * float(table.lengths.mean())
    present = folder_bytes(recipe.checkpoints)
    replayed = sum(len(sample.input_ids) for sample in tables["eval"] if sample.greedy)
    left = needs.count - done // train.checkpoint_every if done < steps else 0
    return [
        StagePlan(
            "train",
            round(steps * per_step),
            round(max(0, steps - done) * per_step),
            present,
            max(0, needs.bytes - present) if done < steps else 0,
            needs.count * _FILES_PER_DRAFTER,
            _training_rate(recipe, rates),
            devices,
        ),
        StagePlan(
            "replay",
            needs.count * replayed,
            left * replayed,
            rate=rates.get("replay"),
            devices=devices,
        ),
    ]


def _training_rate(recipe: Recipe, rates: dict[str, Rate]) -> Rate | None:
    """Tokens per second of a training step, the target's forward included where it is online."""
    train, extract = rates.get("train"), rates.get("extract")
    if recipe.extract.features != "online" or train is None or extract is None:
        return None if recipe.extract.features == "online" else train
    both = 1 / (1 / train.tokens_per_s + 1 / extract.tokens_per_s)
    return Rate(both, train.source)


def _live(recipe: Recipe, table: SampleTable, rates: dict[str, Rate]) -> StagePlan:
    """Live decoding of one checkpoint, every response at its longest."""
    config = recipe.eval
    sources = Counter(sample.source for sample in table)
    prompts = sum(min(count, config.live_prompts) for count in sources.values())
    responses = prompts * len(methods_of(config.tree_budgets)) * len(config.temperatures)
    tokens = responses * config.max_new_tokens
    return StagePlan("live", tokens, tokens, rate=rates.get("live"))
