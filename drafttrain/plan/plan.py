"""``drafttrain plan``: what a run costs and whether it fits, before anything long starts.

    recipe + finished sample tables + rates -> Plan -> table on the screen, JSON, or a refusal

Everything that lies finished on the disk counts: sealed shards and complete checkpoints are done,
only what remains must fit. Bytes are forecast as extraction itself forecasts them; reports and logs
(a few kilobytes a checkpoint) are not counted. Cost: reading the tables and the shard records.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.consumers import read_consumers
from drafttrain.data.errors import DataError, StoreError
from drafttrain.data.files import write_json
from drafttrain.data.samples import SampleTable, read_table
from drafttrain.data.sizes import human_bytes
from drafttrain.extract.plan import StorePlan, plan_store, read_shape
from drafttrain.features import training_stream
from drafttrain.recipe import SPLITS, Recipe

from .needs import RunNeeds
from .options import Proposal, propose
from .space import Limit, folder_bytes, limits_of
from .stage_plan import Rate, StagePlan, plan_stages


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's cost.

    Attributes:
        stages: in order.
        limits: of the disk, the tightest first.
        proposals: what would make it smaller; empty if it fits.
    """

    stages: list[StagePlan]
    limits: list[Limit]
    proposals: list[Proposal]

    @property
    def bytes_left(self) -> int:
        """Still to be written by all stages."""
        return sum(stage.bytes_left for stage in self.stages)

    @property
    def reusable(self) -> int:
        """What stores and checkpoints take now; free again if they start anew."""
        return sum(stage.bytes_done for stage in self.stages if stage.name != "prepare")

    @property
    def fits(self) -> bool:
        """Whether what remains fits the tightest limit."""
        return self.bytes_left <= self.limits[0].bytes

    def refuse_if_too_large(self) -> None:
        """Raise StoreError, with every proposal, if the run does not fit."""
        if self.fits:
            return
        lines = [
            f"{human_bytes(self.bytes_left)} are still to be written, but"
            f" {human_bytes(self.limits[0].bytes)} are {self.limits[0].name}. One changed setting"
            " (a store that was begun starts anew) would bring the whole run from"
            f" {human_bytes(self.bytes_left + self.reusable)} to"
        ]
        for proposal in self.proposals:
            verdict = "fits" if proposal.fits else "does not fit either"
            lines.append(f"{human_bytes(proposal.bytes)}: {proposal.change} ({verdict})")
        raise StoreError("\n  ".join(lines))

    def write(self, path: Path) -> None:
        """The plan as JSON, bytes and hours unrounded."""
        write_json(path, self._values())

    def _values(self) -> dict[str, Any]:
        return {
            "stages": [
                asdict(stage) | {"gpu_hours": stage.gpu_hours, "wall_hours": stage.wall_hours}
                for stage in self.stages
            ],
            "bytes_left": self.bytes_left,
            "limits": [asdict(limit) for limit in self.limits],
            "fits": self.fits,
            "proposals": [asdict(proposal) for proposal in self.proposals],
        }


def finished_tables(recipe: Recipe) -> dict[str, SampleTable]:
    """The sample table of each split.

    Raises:
        DataError: a table is missing, damaged or empty.
    """
    tables = {}
    for split in SPLITS:
        path = recipe.table(split)
        if not path.exists():
            raise DataError(f"{path} does not exist: run `drafttrain data prepare` first")
        tables[split] = read_table(path)
        if not len(tables[split]):
            raise DataError(f"{path} has no samples: nothing to plan; see its manifest")
    return tables


def make_plan(recipe: Recipe, rates: dict[str, Rate], devices: int, space: int | None) -> Plan:
    """Plan a run.

    Args:
        recipe: of the run.
        rates: tokens per second of one device, by stage; what is missing stays unknown.
        devices: GPUs that share extraction and training.
        space: what the run's folder may hold in all, or None.

    Raises:
        DataError: the sample tables are not finished.
        StoreError: a store of other settings is in the way, or damaged, or the budget of a rolling
            one is too small.
        TargetError: the target's configuration cannot be read, or the taps do not fit it.
    """
    tables = finished_tables(recipe)
    shape = read_shape(recipe.target)
    stores = {
        split: plan_store(shape, recipe.extract, tables[split], recipe.store(split))
        for split in recipe.stored_splits
    }
    needs = RunNeeds(recipe, shape, tables)
    if recipe.extract.features == "rolling":
        least = needs.least_budget(recipe.extract)
        stores = {"train": _rolling_store(recipe, tables["train"], least), **stores}
    stages = plan_stages(recipe, tables, stores, needs.checkpoints(), rates, devices)
    limits = limits_of(recipe.output, space)
    plan = Plan(stages, limits, [])
    if plan.fits:
        return plan
    return Plan(stages, limits, propose(needs, limits[0].bytes + plan.reusable))


def _rolling_store(recipe: Recipe, table: SampleTable, least: int) -> StorePlan:
    """A rolling store: every epoch through the target, never more on the disk than the budget."""
    budget, folder = recipe.extract.budget_bytes, recipe.store("train")
    if budget < least:
        raise StoreError(
            f"extract.budget {human_bytes(budget)} is too small: one training step needs"
            f" {human_bytes(least)}; raise it, or lower extract.shard_tokens or train.global_batch"
        )
    stream = training_stream(recipe, table)
    consumers = read_consumers(folder).values()
    position = min((consumer.position for consumer in consumers), default=0)
    present = folder_bytes(folder)
    return StorePlan(
        tokens=int(stream.lengths.sum()),
        tokens_done=int(stream.lengths[:position].sum()),
        bytes_done=present,
        bytes_left=max(0, budget - present),
        files=sum(path.is_file() for path in folder.glob("*")),
    )
