"""The feature store on disk: its files, its settings (``store.json``), its shard plan and records.

    store.json            StoreMeta: what the states were made from and what they mean
    head.safetensors      the target's embedding, LM head and final norm
    shard-NNNNN.parquet   sample_id, source, mode, greedy, offset, length, input_ids, loss_mask
    shard-NNNNN.safetensors   taps [tokens, n_taps, hidden], optional final [tokens, hidden],
                              each as the parts of its codec
    shard-NNNNN.json      ShardRecord: sizes, checksums, counts, statistics; written last

Guarantee: a shard without a valid record does not exist. The plan is a pure function of the sample
lengths and ``shard_tokens``; no file holds a time, a host name or a version of a library, so equal
inputs give equal bytes whoever wrote them and however often they were interrupted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from .codec import CODECS
from .errors import StoreError
from .files import content_hash, read_json, write_json

FORMAT_VERSION = 3
META_NAME = "store.json"
HEAD_NAME = "head.safetensors"
REMEDY = "rerun the same `drafttrain extract` command"  # what is not there yet
REPAIR = "run `drafttrain store repair` with its recipe"  # what is damaged

# What the numbers mean; a store that says anything else is not read.
CONVENTIONS = {
    "layer_id": "L is the output of decoder layer L (Transformers hidden_states[L + 1])",
    "final_hidden": "after the final norm: logits = lm_head @ final",
    "position": "row t belongs to token t, never shifted",
}
TRANSFORMERS = "transformers"  # the engine that defines the states; others prove their parity
# Where a target lies is not what it is: its fingerprint decides.
INFORMATIONAL = ("target", "target_revision")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StoreMeta(_Strict):
    """What a feature store was made from and how it is laid out (``store.json``)."""

    format_version: int = FORMAT_VERSION
    conventions: dict[str, str] = CONVENTIONS
    target: str
    target_revision: str | None
    target_dtype: str
    target_fingerprint: str
    tokenizer_hash: str
    template_hash: str | None
    stop_ids: list[int]
    rope_theta: float
    max_positions: int
    taps: list[int]
    num_target_layers: int
    hidden_size: int
    vocab_size: int
    final_hidden: bool
    codec: str
    table_hash: str
    shard_tokens: int
    num_samples: int
    num_tokens: int
    num_shards: int
    head_checksum: str
    order_seed: int | None = None
    """Of a rolling store: samples follow the training order of this seed, epoch after epoch."""

    def identity(self) -> str:
        """Hash of everything that decides the bytes of the shards."""
        return content_hash(self.model_dump(exclude=set(INFORMATIONAL)))

    def tensors(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Tensor name -> (dtype, shape of one token) of every tensor in a shard."""
        shapes: dict[str, tuple[int, ...]] = {"taps": (len(self.taps), self.hidden_size)}
        if self.final_hidden:
            shapes["final"] = (self.hidden_size,)
        return {
            f"{field}{suffix}": (part.dtype, shape[:-1] if part.per_row else shape)
            for field, shape in shapes.items()
            for suffix, part in CODECS[self.codec][field].parts.items()
        }

    def fields(self) -> dict[str, list[str]]:
        """ "taps" and, where the store has it, "final" -> the names of its tensors, sorted."""
        names = ("taps", "final") if self.final_hidden else ("taps",)
        codec = CODECS[self.codec]
        return {name: sorted(name + suffix for suffix in codec[name].parts) for name in names}

    def bytes_per_token(self) -> int:
        """Forecast of stored bytes per token: states, plus 5 bytes of id and mask."""
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.tensors().values()) + 5


class FileRecord(_Strict):
    """Size and checksum of one finished file."""

    bytes: int
    xxh3_128: str


class StateStatistics(_Strict):
    """Scale of one tap (or of the final hidden state) over a shard.

    Attributes:
        rms: root mean square of all values.
        min: smallest row norm; a row's norm is the root mean square of its values.
        median: norm of the median row.
        p99: row norm that 1 % of the rows exceed.
        max: largest row norm: attention sinks.
    """

    rms: float
    min: float
    median: float
    p99: float
    max: float


class ShardRecord(_Strict):
    """The seal of one shard (``shard-NNNNN.json``).

    ``sample_checksums`` has one per sample and field: xxh3-64 of its rows of the field's tensors,
    in the order of their names.
    """

    index: int
    engine: str
    store: str
    table_hash: str
    num_samples: int
    num_tokens: int
    lengths: list[int]
    finite: bool
    taps: dict[str, StateStatistics]
    final: StateStatistics | None
    files: dict[str, FileRecord]
    sample_checksums: dict[str, list[str]]
    seal: str = ""

    @property
    def states(self) -> dict[str, StateStatistics]:
        """Layer id as text, or "final", -> statistics."""
        return {**self.taps, **({"final": self.final} if self.final is not None else {})}

    def sealed(self) -> "ShardRecord":
        """The record with the hash of its own content."""
        return self.model_copy(update={"seal": content_hash(self.model_dump(exclude={"seal"}))})


@dataclass(frozen=True, slots=True)
class Shard:
    """One planned shard: samples ``first .. stop-1`` of the table, ``tokens`` in all."""

    index: int
    first: int
    stop: int
    tokens: int

    @classmethod
    def named(cls, index: int) -> "Shard":
        """A shard of which only the names of its files are wanted."""
        return cls(index, 0, 0, 0)

    @property
    def stem(self) -> str:
        return f"shard-{self.index:05d}"

    @property
    def parquet(self) -> str:
        return f"{self.stem}.parquet"

    @property
    def states(self) -> str:
        return f"{self.stem}.safetensors"

    @property
    def record(self) -> str:
        return f"{self.stem}.json"


def plan_shards(lengths: Sequence[int] | np.ndarray, shard_tokens: int) -> list[Shard]:
    """Cut the table into shards of whole samples, in table order.

    Args:
        lengths: tokens per sample, in table order.
        shard_tokens: tokens a shard may hold; a longer sample gets a shard of its own.
    """
    shards: list[Shard] = []
    first = tokens = 0
    for i, length in enumerate(int(n) for n in lengths):
        if tokens and tokens + length > shard_tokens:
            shards.append(Shard(len(shards), first, i, tokens))
            first, tokens = i, 0
        tokens += length
    if tokens:
        shards.append(Shard(len(shards), first, len(lengths), tokens))
    return shards


_Model = TypeVar("_Model", bound=_Strict)


def _parse(kind: type[_Model], value: dict[str, Any], path: Path, remedy: str) -> _Model:
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{path}: field '{field}': {first['msg']}; {remedy}") from None


def read_meta(folder: Path) -> StoreMeta:
    """Read and check ``store.json``; anything this version cannot read is a StoreError."""
    if not folder.is_dir():
        raise StoreError(
            f"{folder} is not a feature store (no such folder): run `drafttrain extract`"
        )
    path = folder / META_NAME
    remedy = f"{REPAIR}, or move this folder away and run `drafttrain extract` again"
    value = read_json(path, StoreError, remedy)
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path}: format version {version}, this drafttrain reads {FORMAT_VERSION}: extract"
            " the store again, or read it with the version of drafttrain that wrote it"
        )
    meta = _parse(StoreMeta, value, path, remedy)
    if meta.conventions != CONVENTIONS:
        raise StoreError(
            f"{path}: conventions {meta.conventions} are not the ones this version reads: {remedy}"
        )
    if meta.codec not in CODECS:
        raise StoreError(
            f"{path}: unknown codec '{meta.codec}' (known: {sorted(CODECS)}); {remedy}"
        )
    if meta.taps != sorted(set(meta.taps)) or not meta.taps or meta.taps[0] < 0:
        raise StoreError(f"{path}: taps {meta.taps} are not ascending layer ids; {remedy}")
    if meta.taps[-1] > meta.num_target_layers - 2:
        raise StoreError(
            f"{path}: tap {meta.taps[-1]} is out of range for {meta.num_target_layers} target"
            f" layers; {remedy}"
        )
    return meta


def changed_settings(old: StoreMeta, new: StoreMeta, among: Sequence[str] = ()) -> list[str]:
    """Settings in which two stores differ, in words: of ``among``, or all but where targets lie."""
    names = among or [name for name in StoreMeta.model_fields if name not in INFORMATIONAL]
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in names}
    return [f"{name} {a} there, {b} now" for name, (a, b) in pairs.items() if a != b]


def write_meta(
    folder: Path, meta: StoreMeta, owner: str = "", confirm: Callable[[], None] = lambda: None
) -> None:
    """Write ``store.json`` atomically; see ``files.publish``."""
    write_json(folder / META_NAME, meta.model_dump(), owner, confirm)


def read_record(folder: Path, shard_name: str, meta: StoreMeta) -> ShardRecord:
    """Read one shard's record and check its seal and that it belongs to this store.

    Raises:
        StoreError: the record is missing, malformed, altered, not finite, or of another store.
    """
    path = folder / shard_name
    value = read_json(path, StoreError, REPAIR)
    record = _parse(ShardRecord, value, path, REPAIR)
    if not record.finite:
        raise StoreError(f"{path}: the shard is not marked finite; {REPAIR}")
    if record.table_hash != meta.table_hash:
        raise StoreError(
            f"{path}: made from sample table {record.table_hash}, the store from"
            f" {meta.table_hash}; {REPAIR}"
        )
    if record.store != meta.identity():
        raise StoreError(
            f"{path}: belongs to a store with other settings ({record.store}, not"
            f" {meta.identity()}); {REPAIR}"
        )
    if record.sealed().seal != record.seal:
        raise StoreError(f"{path}: its content does not match its seal; {REPAIR}")
    return record
