"""Where training gets its samples from: a finished store, a rolling one, or the target itself.

    positions of the training stream -> (epoch, sample with its states)

    stored    everything lies in a feature store
    rolling   extraction runs ahead of training on another device or machine, into a bounded disk
    online    the target runs in the training process, through the engine of the extraction

Guarantee: all three give the same samples in the same order, with states that went through the
same codec, so batches are identical and losses agree to the rounding of the target's forward (other
neighbours in a batch). Cost: reading; for ``online`` one target forward per sample and epoch, and
the target's memory on every rank.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from drafttrain.data.consumers import consumer_name
from drafttrain.data.errors import RecipeError, StoreError
from drafttrain.data.order import sample_at
from drafttrain.data.rolling_reader import RollingStore
from drafttrain.data.samples import SampleTable, read_table
from drafttrain.data.store_format import StoreMeta
from drafttrain.data.store_reader import FeatureStore, StoredSample, stored_sample
from drafttrain.data.stream import Stream
from drafttrain.extract.head import Head, load_head
from drafttrain.extract.owners import new_owner

from .recipe import Recipe

Drawn = tuple[int, StoredSample]


class Features(Protocol):
    """A source of training samples.

    Attributes:
        meta: what the states are.
        lengths: int64 [samples], tokens of each training sample.
        head: the target's frozen embedding, LM head and final norm.
    """

    meta: StoreMeta
    lengths: npt.NDArray[np.int64]
    head: Head

    def sample_id(self, index: int) -> str:
        """The name of a sample."""

    def wait(self, positions: range) -> None:
        """Return when these positions can be read; of a whole step, so that all ranks wait."""

    def prefetch(self, positions: Sequence[int]) -> None:
        """What this rank will read next, in this order; replaces what was said before."""

    def read(self, positions: Sequence[int]) -> list[Drawn]:
        """The samples of one micro-batch, each with its epoch."""

    def release(self, position: int) -> None:
        """Nothing before this position is needed any more."""


def open_features(recipe: Recipe, device: torch.device, rank: int) -> Features:
    """The source that ``extract.features`` names.

    Raises:
        DraftTrainError: what it reads is missing, damaged, or of other settings.
    """
    match recipe.extract.features:
        case "stored":
            return _Stored(recipe)
        case "rolling":
            return _Rolling(recipe, reports=rank == 0)
        case "online":
            return _Online(recipe, device)


def features_meta(recipe: Recipe) -> StoreMeta:
    """What the training states will be, before anything long starts.

    Raises:
        DraftTrainError: as ``open_features``, as far as it can be seen without the target.
    """
    match recipe.extract.features:
        case "stored":
            return FeatureStore(recipe.store("train")).meta
        case "rolling":
            return _Rolling(recipe, reports=False).meta
        case "online":
            read_table(recipe.table("train"))
            return FeatureStore(recipe.store("eval")).meta


class _Stored:
    """A finished store."""

    def __init__(self, recipe: Recipe) -> None:
        # The final state is for no loss of the trainer's.
        self._store, self._seed = FeatureStore(recipe.store("train"), final=False), recipe.seed
        self.meta, self.lengths = self._store.meta, self._store.lengths
        self.head = load_head(self._store)

    def sample_id(self, index: int) -> str:
        return self._store.index(index).sample_id

    def wait(self, positions: range) -> None:
        pass

    def prefetch(self, positions: Sequence[int]) -> None:
        count, seed = len(self.lengths), self._seed
        self._store.prefetch(sample_at(count, seed, position)[1] for position in positions)

    def read(self, positions: Sequence[int]) -> list[Drawn]:
        drawn = [sample_at(len(self.lengths), self._seed, position) for position in positions]
        return [(epoch, self._store.sample(index)) for epoch, index in drawn]

    def release(self, position: int) -> None:
        pass


class _Rolling:
    """A store that extraction fills ahead of this run and empties behind it."""

    def __init__(self, recipe: Recipe, reports: bool) -> None:
        self._table, self._seed = read_table(recipe.table("train")), recipe.seed
        self._store = RollingStore(
            recipe.store("train"),
            training_stream(recipe, self._table),
            "drafttrain extract",
            consumer_name(recipe.output) if reports else None,
            new_owner(),
            final=False,
        )
        self.meta, self.lengths = self._store.meta, self._table.lengths
        self.head = load_head(self._store)

    def sample_id(self, index: int) -> str:
        return self._table[index].sample_id

    def wait(self, positions: range) -> None:
        self._store.wait(positions)

    def prefetch(self, positions: Sequence[int]) -> None:
        self._store.prefetch(positions)

    def read(self, positions: Sequence[int]) -> list[Drawn]:
        count = len(self.lengths)
        return [(position // count, self._store.sample(position)) for position in positions]

    def release(self, position: int) -> None:
        self._store.release(position)


class _Online:
    """The target on this rank's device; head and settings come from the evaluation store."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        # Here, as they take seconds to import and no other source needs them.
        from drafttrain.extract.engine import Engine
        from drafttrain.extract.opening import check_samples
        from drafttrain.extract.settings import store_settings
        from drafttrain.extract.target import load_target

        self._table, self._seed = read_table(recipe.table("train")), recipe.seed
        evaluation = FeatureStore(recipe.store("eval"))
        self.head = load_head(evaluation)
        target = load_target(recipe.target, device)
        if target.fingerprint != evaluation.meta.target_fingerprint:
            raise StoreError(
                f"{evaluation.path} was made from another target than {target.name}: extract the"
                " evaluation samples again into another output folder"
            )
        check_samples(self._table, target, recipe.table("train"))
        self.meta = store_settings(
            target, recipe.extract, self._table, evaluation.meta.head_checksum
        )
        self.lengths = self._table.lengths
        self._batch_tokens = recipe.extract.batch_tokens
        # Open as long as the process trains.
        self._open = ExitStack()
        self._engine = self._open.enter_context(
            Engine(target, self.meta.taps, self.meta.codec, final_hidden=False, to_host=False)
        )

    def sample_id(self, index: int) -> str:
        return self._table[index].sample_id

    def wait(self, positions: range) -> None:
        pass

    def prefetch(self, positions: Sequence[int]) -> None:
        pass

    def read(self, positions: Sequence[int]) -> list[Drawn]:
        drawn = [sample_at(len(self.lengths), self._seed, position) for position in positions]
        samples = [self._table[index] for _, index in drawn]
        found: dict[int, StoredSample] = {}
        ids = [sample.input_ids for sample in samples]
        for _, number, taps, _ in self._engine.features([ids], self._batch_tokens):
            found[number] = stored_sample(samples[number], taps, None)
        return [(epoch, found[number]) for number, (epoch, _) in enumerate(drawn)]

    def release(self, position: int) -> None:
        pass


def training_stream(recipe: Recipe, table: SampleTable) -> Stream:
    """The samples of a whole training run, in its order.

    Raises:
        RecipeError: the recipe makes no step.
    """
    steps = training_steps(recipe, len(table))
    return Stream(table, recipe.seed, steps * recipe.train.global_batch)


def training_steps(recipe: Recipe, samples: int) -> int:
    """Optimizer steps of a run on so many samples.

    Raises:
        RecipeError: there are none.
    """
    steps = recipe.train.steps(samples)
    if steps < 1:
        raise RecipeError(
            f"train.epochs {recipe.train.epochs} of {samples} samples make no step of "
            f"train.global_batch {recipe.train.global_batch}"
        )
    return steps
