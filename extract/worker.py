"""Extraction: a sample table and a target -> a finished feature store, shard by shard.

Any number of workers, on any number of machines that share the folder, run the same command; each
takes shards nobody has (``claims``), or every Nth shard if told so. Rerunning the command
continues: what is done is read from the sealed records on disk each time, and only missing shards
are computed. Guarantee: the finished store has the same bytes whoever wrote it and however often
the work was interrupted. Cost: one target forward per token, ``pipeline.SHARDS`` shards in memory.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drafttrain.data.files import no_space_explained
from drafttrain.data.samples import SampleTable, read_table
from drafttrain.data.store_format import Shard, StoreMeta, plan_shards
from drafttrain.data.store_parity import proved, write_parity
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_writer import is_sealed, sealed_record
from drafttrain.data.stream import Stream

from .claims import Claim, Claims
from .config import ExtractConfig
from .engine import Engine
from .opening import STORE_UNIT, check_samples, forecast, open_store
from .parity import prove_parity
from .pipeline import ShardWriter
from .progress import ExtractionProgress
from .server_engine import ServerEngine
from .taps import resolve_taps
from .target import Target

_LONGEST_POLL_S = 1.0
_LOGGER = logging.getLogger(__name__)

# What can compute the states (``extract.engine``).
ENGINES: dict[str, Callable[[Target, StoreMeta, ExtractConfig, str], "Engine | ServerEngine"]] = {
    "transformers": lambda target, meta, config, owner: Engine(
        target, meta.taps, meta.codec, meta.final_hidden
    ),
    "vllm": ServerEngine,
}


class Share(NamedTuple):
    """Shards ``worker``, ``worker + workers``, … of a static split."""

    worker: int
    workers: int


def extract(target: Target, config: ExtractConfig, table_path: Path, out_dir: Path) -> FeatureStore:
    """Extract a sample table into a feature store, or finish one that was begun.

    Other workers may do the same at the same time; each waits until all shards are sealed.

    Args:
        target: the frozen target.
        config: what to take and how to store it.
        table_path: a finished sample table.
        out_dir: the store's folder; made if absent.

    Returns:
        The finished store.

    Raises:
        StoreError: table and target do not fit, the folder holds another store, the disk is too
            small, or the target gave unusable states. Sealed shards stay as they are.
        TargetError: the taps do not fit, or the head does not reproduce the target's logits.
        DataError: the table is missing or damaged.
    """
    table = read_table(table_path)
    check_samples(table, target, table_path)
    Worker(target, config, table, out_dir).run(Share(0, 1))
    return FeatureStore(out_dir, table.table_hash)


def extract_share(
    target: Target, config: ExtractConfig, table_path: Path, out_dir: Path, share: Share
) -> int:
    """Extract one share of a store and wait for nobody else; arguments and errors as ``extract``.

    Returns:
        How many shards of the whole store were not sealed at the end.
    """
    table = read_table(table_path)
    check_samples(table, target, table_path)
    return Worker(target, config, table, out_dir).run(share)


class Worker:
    """One worker's part in one store.

    Args:
        target: the frozen target.
        config: what to take and how to store it.
        table: the samples, which were checked.
        out_dir: the store's folder.
    """

    def __init__(
        self, target: Target, config: ExtractConfig, table: SampleTable | Stream, out_dir: Path
    ) -> None:
        resolve_taps(config.taps, target.num_layers)
        self._target, self._config, self._table, self._out_dir = target, config, table, out_dir
        self._shards = plan_shards(table.lengths, config.shard_tokens)
        self._pending: dict[int, Shard] = {}
        """Of this share, not known to be sealed; the writing thread removes from it too."""
        self._done: list[Shard] = []
        self._poll_s = min(_LONGEST_POLL_S, config.claim_expiry_s / 10)
        self._progress = ExtractionProgress(out_dir.name)

    def run(self, share: Share) -> int:
        """Do the share; return how many shards of the store are left to other workers."""
        out_dir = self._out_dir
        with self._opened() as (meta, claims):
            todo = [shard for shard in self._shards if not is_sealed(out_dir, shard, meta)]
            claims.sweep(self._finished(todo))
            forecast(meta, todo, len(self._shards), out_dir)
            self._pending = {s.index: s for s in todo if s.index % share.workers == share.worker}
            self._extract(meta, claims)
            left = [shard for shard in todo if not is_sealed(out_dir, shard, meta)]
            claims.sweep(self._finished(left))
        if left:
            _LOGGER.info("%s: %d shards are left to other workers", out_dir, len(left))
        return len(left)

    def _kept(self) -> str:
        return f"the {len(self._done)} shards sealed in this run"

    def _finished(self, unsealed: list[Shard]) -> set[str]:
        """Units of work that nobody has to do any more."""
        return {STORE_UNIT, *(shard.stem for shard in self._shards)} - {s.stem for s in unsealed}

    @contextmanager
    def _opened(self) -> Iterator[tuple[StoreMeta, Claims]]:
        """The store's settings and this worker's claims on it."""
        out_dir, config = self._out_dir, self._config
        out_dir.mkdir(parents=True, exist_ok=True)
        explained = no_space_explained(out_dir, self._kept)
        with explained, Claims(out_dir, config.claim_expiry_s) as claims:
            yield (
                open_store(self._target, config, self._table, claims, out_dir, self._wait),
                claims,
            )

    def _extract(self, meta: StoreMeta, claims: Claims) -> None:
        """Take shards while there are any, then wait for those of other workers."""
        name = self._config.engine
        engine = ENGINES[name](self._target, meta, self._config, claims.owner)
        writer = ShardWriter(meta, self._out_dir, claims, self._sealed, self._keep, name)
        with self._progress as progress, engine:
            if isinstance(engine, ServerEngine):
                self._prove(engine, meta, claims)
            progress.expect(sum(shard.tokens for shard in self._pending.values()))
            started = time.monotonic()
            with writer:
                while self._unfinished():
                    taken: list[Shard] = []
                    groups = self._take(meta, claims, writer, taken)
                    for group, number, taps, final in engine.features(
                        groups, self._config.batch_tokens
                    ):
                        writer.put(taken[group].index, number, taps, final)
                        progress.advance(len(taps))
                    if not taken and writer.drain(self._poll_s) and self._unfinished():
                        self._wait(self._holders(claims))
        tokens, seconds = sum(s.tokens for s in self._done), time.monotonic() - started
        _LOGGER.info(
            "%s: %d shards, %s tokens in %.0f s (%.0f tokens/s)",
            self._out_dir,
            len(self._done),
            f"{tokens:,}",
            seconds,
            tokens / seconds if tokens else 0,
        )

    def _prove(self, engine: ServerEngine, meta: StoreMeta, claims: Claims) -> None:
        """Compare the engine before anything of it is written, or what it wrote lacks its proof."""
        if not self._unfinished():
            records = [sealed_record(self._out_dir, shard, meta) for shard in self._shards]
            name = self._config.engine
            wrote = any(record is not None and record.engine == name for record in records)
            if not wrote or name in proved(self._out_dir, meta):
                return
        record = prove_parity(self._config.engine, engine.both, meta, self._table)
        write_parity(self._out_dir, record, claims.owner)

    def _take(
        self, meta: StoreMeta, claims: Claims, writer: ShardWriter, taken: list[Shard]
    ) -> Iterator[list[npt.NDArray[np.int32]]]:
        """Token ids of every shard that is free, claimed and announced when it is asked for."""
        for shard in self._candidates():
            if is_sealed(self._out_dir, shard, meta):
                self._seen_sealed(shard)
            elif claims.take(shard.stem):
                # Between the look at the record and the claim another worker may have sealed it.
                if is_sealed(self._out_dir, shard, meta):
                    claims.release(shard.stem)
                    self._seen_sealed(shard)
                    continue
                if not self._admit(shard):
                    claims.release(shard.stem)
                    return
                # Of a shard whose files were cut short, or whose writer died before its record.
                for name in (shard.record, shard.parquet, shard.states):
                    (self._out_dir / name).unlink(missing_ok=True)
                samples = [self._table[i] for i in range(shard.first, shard.stop)]
                writer.begin(shard, samples)
                taken.append(shard)
                yield [sample.input_ids for sample in samples]

    def _unfinished(self) -> bool:
        """Whether there is anything left to do or to wait for."""
        return bool(self._pending)

    def _candidates(self) -> Iterator[Shard]:
        """Shards to take, in order."""
        yield from list(self._pending.values())

    def _admit(self, shard: Shard) -> bool:
        """Whether a claimed shard may be begun now."""
        return True

    def _keep(self, shard: Shard) -> bool:
        """Whether a shard that was begun is still wanted."""
        return True

    def _seen_sealed(self, shard: Shard) -> None:
        """Cross off what another worker has done."""
        if self._pending.pop(shard.index, None) is not None:
            self._progress.expect(-shard.tokens)

    def _sealed(self, shard: Shard) -> None:
        self._done.append(shard)
        self._pending.pop(shard.index, None)
        _LOGGER.info("%s sealed, %d to go", shard.stem, len(self._pending))

    def _holders(self, claims: Claims) -> dict[str, Claim]:
        """Who works on what this worker waits for."""
        found = {s.stem: claims.holder(s.stem) for s in list(self._pending.values())}
        return {unit: claim for unit, claim in found.items() if claim is not None}

    def _wait(self, holders: dict[str, Claim]) -> None:
        self._progress.waiting({unit: claim.who for unit, claim in holders.items()})
        time.sleep(self._poll_s)
