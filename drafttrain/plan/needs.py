"""How many bytes a run needs on the disk: the stores, their heads, and the checkpoints.

    recipe + target shape + sample tables -> bytes of any variant of the run

A variant is another ``extract:`` section or fewer training samples: what a plan that does not fit
is offered. Cost: the drafter is built without memory to count its parameters.
"""

from dataclasses import dataclass

import torch

from drafttrain.checkpoint import state_bytes
from drafttrain.data.samples import SampleTable
from drafttrain.data.store_format import plan_shards
from drafttrain.data.stream import Stream
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.resolve import resolve_config
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.plan import TargetShape, store_bytes, store_layout
from drafttrain.extract.window import Window
from drafttrain.recipe import Recipe


@dataclass(frozen=True, slots=True)
class CheckpointNeeds:
    """Bytes of a run's checkpoints.

    Attributes:
        count: checkpoints of the whole run; each leaves an exported drafter.
        drafter: bytes of one exported drafter.
        state: bytes of one optimizer state.
        states: how many of these lie on the disk at most.
    """

    count: int
    drafter: int
    state: int
    states: int

    @property
    def bytes(self) -> int:
        """At the fullest moment, which is the end."""
        return self.count * self.drafter + self.states * self.state


class RunNeeds:
    """Bytes of a run and of its variants.

    Args:
        recipe: of the run.
        shape: of its target.
        tables: sample table of each split.
    """

    def __init__(self, recipe: Recipe, shape: TargetShape, tables: dict[str, SampleTable]) -> None:
        self.recipe, self.shape, self.tables = recipe, shape, tables

    def total(self, extract: ExtractConfig | None = None, samples: int | None = None) -> int:
        """Bytes of the finished run.

        Args:
            extract: instead of the recipe's.
            samples: only the first so many training samples.
        """
        extract = extract or self.recipe.extract
        return self.stores(extract, samples) + self.checkpoints(extract, samples).bytes

    def stores(self, extract: ExtractConfig, samples: int | None = None) -> int:
        """Bytes of the stores with their heads; of a rolling one, its budget."""
        return sum(self.store(extract, split, samples) for split in self.tables)

    def store(self, extract: ExtractConfig, split: str, samples: int | None = None) -> int:
        """Bytes of one store with its head at its fullest; 0 where there is none."""
        table = self.tables[split]
        if split == "train" and extract.features != "stored":
            return 0 if extract.features == "online" else extract.budget_bytes
        lengths = table.lengths[:samples] if split == "train" else table.lengths
        layout = store_layout(self.shape, extract, table)
        return store_bytes(layout, int(lengths.sum())) + self.shape.head_bytes()

    def least_budget(self, extract: ExtractConfig) -> int:
        """The smallest ``extract.budget`` of a rolling training store."""
        table, step = self.tables["train"], self.recipe.train.global_batch
        stream = Stream(table, self.recipe.seed, self.recipe.train.steps(len(table)) * step)
        shards = plan_shards(stream.lengths, extract.shard_tokens)
        layout = store_layout(self.shape, extract, table)
        return Window(layout, shards, 0, self.shape.head_bytes(), step).least

    def checkpoints(
        self, extract: ExtractConfig | None = None, samples: int | None = None
    ) -> CheckpointNeeds:
        """What training will leave in ``checkpoints/``."""
        recipe = self.recipe
        train = recipe.train
        steps = train.steps(len(self.tables["train"]) if samples is None else samples)
        count = max(1, -(-steps // train.checkpoint_every))
        weights = self._parameters(extract or recipe.extract)
        return CheckpointNeeds(
            count=count,
            drafter=weights * (2 if train.precision == "bf16" else 4),
            state=state_bytes(weights, train),
            # A new one is complete before the oldest is dropped.
            states=min(count, train.keep_checkpoints + 1),
        )

    def _parameters(self, extract: ExtractConfig) -> int:
        layout = store_layout(self.shape, extract, self.tables["train"])
        with torch.device("meta"):
            drafter = Drafter(resolve_config(self.recipe.drafter, layout))
        return sum(parameter.numel() for parameter in drafter.parameters())
