"""Check a store, finished or not: folder -> which shards are whole, bad or missing, and why.

Every shard is judged on its own, so one bad file hides no other: record and seal, sizes, checksums
of files and samples, headers, Parquet columns, the gate of ``store_gate`` on every stored row,
norms against the record, and the norms of all shards against each other. Nothing is changed. Cost:
every byte is read once from the disk and twice from memory, 0.7 s a GB and core, several shards at
a time.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import DownloadColumn, TransferSpeedColumn
from torch import Tensor

from .errors import StoreError
from .progress import make_progress
from .shard_states import ShardStates, checksum_rows
from .store_format import (
    REMEDY,
    REPAIR,
    Shard,
    ShardRecord,
    StoreMeta,
    read_meta,
)
from .store_gate import (
    find_bad_norm,
    find_bad_state,
    find_odd_shards,
    find_other_statistics,
    row_norms,
    statistics,
)
from .store_reader import FeatureStore
from .store_shard import (
    ShardIndex,
    checked_head,
    load_index,
    read_checked_record,
    verify_file,
)

_THREADS = 8  # reading, checksums and norms all run outside the interpreter's lock


@dataclass(slots=True)
class StoreCheck:
    """What was found.

    Attributes:
        folder: the store.
        meta: its settings.
        head: what is wrong with ``head.safetensors``, or None.
        whole: shard number -> record, of shards without a fault.
        bad: shard number -> what is wrong with it, one line that names the file.
        missing: shards without a record.
        plan: how whole shards do not add up to the store, or None.
    """

    folder: Path
    meta: StoreMeta
    head: str | None
    whole: dict[int, ShardRecord] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    plan: str | None = None

    def problems(self) -> list[str]:
        """One line for head and plan, for each bad shard, and for all missing ones."""
        lines = [line for line in (self.head, self.plan) if line is not None]
        lines += [self.bad[index] for index in sorted(self.bad)]
        if self.missing and self.meta.order_seed is None:  # a rolling store has few at a time
            lines.append(
                f"{self.folder}: {len(self.missing)} of {self.meta.num_shards} shards are missing"
                f" ({name_shards(self.missing)}): extraction has not finished; {REMEDY}"
            )
        return lines


def verify_store(folder: Path) -> StoreCheck:
    """Check a store that must be whole.

    Raises:
        StoreError: ``store.json`` cannot be used, or one line per problem.
    """
    check = check_store(folder)
    problems = check.problems()
    if problems:
        raise StoreError("\n".join(problems))
    return check


def check_store(folder: Path, trusted: Mapping[int, ShardRecord] | None = None) -> StoreCheck:
    """Check every shard of a store, whether or not all are there.

    Args:
        folder: the store.
        trusted: shards that were found whole a moment ago; their files are not read again.

    Raises:
        StoreError: ``store.json`` cannot be used.
    """
    meta = read_meta(folder)
    check = StoreCheck(folder, meta, _head_problem(folder, meta))
    shards = [Shard.named(index) for index in range(meta.num_shards)]
    check.whole.update(trusted or {})
    shards = [shard for shard in shards if shard.index not in check.whole]
    sizes = [_size(folder / shard.states) for shard in shards]
    pool = ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))))
    try:
        with make_progress(DownloadColumn(), TransferSpeedColumn()) as progress:
            task = progress.add_task(f"verify {folder.name}", total=sum(sizes))
            found = pool.map(lambda shard: _judge(folder, meta, shard), shards)
            for shard, size, judged in zip(shards, sizes, found, strict=True):
                if isinstance(judged, ShardRecord):
                    check.whole[shard.index] = judged
                elif judged is not None:
                    check.bad[shard.index] = judged
                else:
                    check.missing.append(shard.index)
                progress.advance(task, size)
    finally:
        pool.shutdown(cancel_futures=True)  # else an interrupt waits for all shards
    _compare_shards(check)
    return check


def _judge(folder: Path, meta: StoreMeta, shard: Shard) -> ShardRecord | str | None:
    """A whole shard's record, what is wrong with a bad one, None for a missing one."""
    record = folder / shard.record
    if not record.exists():
        return None
    try:
        return check_shard(folder, meta, shard.index)
    except StoreError as exc:
        problem = str(exc)
    except OSError as exc:  # a bad disk
        problem = f"{folder / shard.states}: cannot be read ({exc}); {REPAIR}"
    return problem if record.exists() else None  # a rolling store's may go at any time


def _head_problem(folder: Path, meta: StoreMeta) -> str | None:
    try:
        checked_head(folder, meta)
    except StoreError as exc:
        return str(exc)
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def check_shard(folder: Path, meta: StoreMeta, index: int) -> ShardRecord:
    """Check one sealed shard to the last byte.

    Returns:
        Its record.

    Raises:
        StoreError: the first thing that is wrong with it, with its file and what to do.
    """
    shard = Shard.named(index)
    record = read_checked_record(folder, shard, meta)
    samples = load_index(folder, record)
    verify_file(folder / shard.states, record.files[shard.states])
    tensors = ShardStates(folder, meta, record).tensors
    norms = row_norms(meta, tensors)
    names = [entry["sample_id"] for entry in samples.names]
    problem = _bad_sample(meta, record, samples, tensors, norms)
    problem = problem or find_bad_norm(meta, norms, samples.offsets, names)
    problem = problem or find_other_statistics(record, statistics(meta, norms))
    if problem is not None:
        raise StoreError(f"{folder / shard.states}: {problem}; {REPAIR}")
    return record


def _bad_sample(
    meta: StoreMeta,
    record: ShardRecord,
    samples: ShardIndex,
    tensors: dict[str, Tensor],
    norms: Tensor,
) -> str | None:
    """The first sample of a shard that is bad by itself."""
    for row, entry in enumerate(samples.names):
        tokens = slice(int(samples.offsets[row]), int(samples.offsets[row + 1]))
        part = {name: tensor[tokens] for name, tensor in tensors.items()}
        problem = find_bad_state(meta, part, norms[tokens], samples.input_ids[tokens])
        for name, tensors_of in meta.fields().items():
            found = checksum_rows(part[n] for n in tensors_of)
            if problem is None and found != record.sample_checksums[name][row]:
                problem = f"{name} do not have the recorded checksum"
        if problem is not None:
            return f"sample {entry['sample_id']}: {problem}"
    return None


def _compare_shards(check: StoreCheck) -> None:
    """Find shards that do not belong with the others, and a plan that does not add up."""
    for index, what in find_odd_shards(check.whole.values()).items():
        shard = Shard.named(index)
        check.bad[index] = f"{check.folder / shard.states}: {what}; {REPAIR}"
        del check.whole[index]
    if check.head is None and len(check.whole) == check.meta.num_shards:
        try:
            FeatureStore(check.folder)
        except StoreError as exc:
            check.plan = str(exc)


def name_shards(indices: Sequence[int]) -> str:
    """Shard numbers in words: [0, 3, 4, 5] -> 'shard-00000, shard-00003 to shard-00005'."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    stems = [[Shard.named(i).stem for i in run] for run in runs]
    return ", ".join(" to ".join(run) for run in stems)
