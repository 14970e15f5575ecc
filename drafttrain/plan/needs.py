"""How many bytes a run needs on the disk: the stores, their heads, and the checkpoints.

    recipe + target shape + sample tables -> bytes of any variant of the run

A variant is another ``extract:`` section or fewer training samples: what a plan that does not fit
is offered. Cost: the drafter is built without memory to count its parameters.
"""

from dataclasses import dataclass

import torch

from drafttrain.checkpoint import state_bytes
from drafttrain.data.samples import SampleTable
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.resolve import resolve_config
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.plan import TargetShape, store_bytes, store_layout
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
        """Bytes of both stores with their heads."""
        tokens = {split: int(table.lengths.sum()) for split, table in self.tables.items()}
        tokens["train"] = int(self.tables["train"].lengths[:samples].sum())
        return sum(
            store_bytes(store_layout(self.shape, extract, table), tokens[split])
            + self.shape.head_bytes()
            for split, table in self.tables.items()
        )

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
