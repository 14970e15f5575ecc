"""The proof that another engine's states are the target's: ``parity-<engine>.json`` in the store.

A store may hold shards of several engines. Transformers defines the states; shards of any other
engine count only while the proof lies beside them: a few samples went through both, and each column
(taps, then the final hidden state) of each token had a cosine of at least ``COSINE`` and a relative
error of at most ``ERROR``. Guarantee: what decides is the measured figures, not a mark that says
"passed", and the proof is of this store's settings. Cost: one small file a look.
"""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import StoreError
from .files import content_hash, read_json, write_json
from .store_format import StoreMeta
from .store_gate import columns

COSINE = 0.999
ERROR = 0.05  # a cosine sees no scale; at 0.999 vectors of one length are 0.045 apart


class ColumnParity(BaseModel):
    """How one column of two engines compares over all tokens of the proof.

    Attributes:
        min_cosine: of the worst token.
        mean_cosine: over all tokens.
        max_error: largest relative error of a token, in L2.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_cosine: float
    mean_cosine: float
    max_error: float

    @property
    def passed(self) -> bool:
        """Not "below the limit fails": a NaN compares as neither."""
        return self.min_cosine >= COSINE and self.max_error <= ERROR


class ParityRecord(BaseModel):
    """What was compared, and what came out (``parity-<engine>.json``).

    Attributes:
        engine: the engine that was compared with Transformers.
        store: identity of the store's settings.
        samples: sample id -> tokens.
        columns: what ``store_gate.columns`` calls it -> agreement.
        seal: hash of the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    engine: str
    store: str
    samples: dict[str, int]
    columns: dict[str, ColumnParity]
    seal: str = ""

    def sealed(self) -> "ParityRecord":
        """The record with the hash of its own content."""
        return self.model_copy(update={"seal": content_hash(self.model_dump(exclude={"seal"}))})


def parity_path(folder: Path, engine: str) -> Path:
    """Where an engine's proof lies."""
    return folder / f"parity-{engine}.json"


def write_parity(
    folder: Path, record: ParityRecord, owner: str = "", confirm: Callable[[], None] = lambda: None
) -> None:
    """Write a proof atomically; see ``files.publish``."""
    path = parity_path(folder, record.engine)
    write_json(path, record.sealed().model_dump(), owner, confirm)


def read_parity(folder: Path, meta: StoreMeta, engine: str) -> ParityRecord:
    """Read an engine's proof.

    Raises:
        StoreError: it is missing, damaged, of other settings, or did not pass.
    """
    path = parity_path(folder, engine)
    remedy = (
        f"run `drafttrain extract` with extract.engine: {engine} and that engine's server up, which"
        " compares it with the target again"
    )
    value = read_json(path, StoreError, remedy)
    try:
        record = ParityRecord.model_validate(value)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{path}: field '{field}': {first['msg']}; {remedy}") from None
    if record.sealed().seal != record.seal:
        raise StoreError(f"{path}: its content does not match its seal; {remedy}")
    if record.engine != engine or record.store != meta.identity():
        raise StoreError(
            f"{path}: proves {record.engine} for a store with settings {record.store}, this one has"
            f" {meta.identity()}; {remedy}"
        )
    failed = [name for name, column in record.columns.items() if not column.passed]
    if failed or not record.samples or list(record.columns) != columns(meta):
        raise StoreError(
            f"{path}: {engine} has not passed for all of {', '.join(columns(meta))}"
            f" (failed: {', '.join(failed) or 'none'}, compared: {', '.join(record.columns)});"
            f" {remedy}"
        )
    return record


def proved(folder: Path, meta: StoreMeta) -> set[str]:
    """Engines whose proof in a folder is valid."""
    names = {path.stem.removeprefix("parity-") for path in folder.glob("parity-*.json")}
    return {name for name in names if _is_proved(folder, meta, name)}


def _is_proved(folder: Path, meta: StoreMeta, engine: str) -> bool:
    try:
        read_parity(folder, meta, engine)
    except StoreError:
        return False
    return True


def require_parity(folder: Path, meta: StoreMeta, engine: str, shard: str) -> None:
    """Refuse a shard of an engine that has not proved itself here.

    Raises:
        StoreError: says which shard, why, and what to do.
    """
    try:
        read_parity(folder, meta, engine)
    except StoreError as exc:
        raise StoreError(
            f"{folder / shard}: written by engine '{engine}', whose states count only with a passed"
            f" parity check: {exc}; or extract these shards anew with `drafttrain store repair`"
        ) from None
