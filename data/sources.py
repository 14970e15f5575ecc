"""Source files to records: JSONL or Parquet rows become conversations or token records.

A ``Conversation`` still has to be rendered by the chat template; a ``TokenRecord`` holds the ids
the target was given and produced, and is used as it is. Rows keep their place (``file line 7``,
``file row 7``; lines count from 1, Parquet rows from 0) for every later message.

Guarantee: each row is yielded once or counted in the drop log; a file without a usable row is an
error. Cost: one line or one batch of rows in memory; Parquet reads only the columns it needs.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .config import SourceConfig
from .drops import DropLog, RowDropped
from .errors import DataError
from .messages import Message, normalise_messages, normalise_tools

_BATCH_ROWS = 1024
_CHAT_COLUMNS = {"messages", "conversations"}
_ID_COLUMNS = {"prompt_ids", "response_ids"}
_COLUMNS = (
    "id",
    "messages",
    "conversations",
    "system",
    "tools",
    "prompt_ids",
    "response_ids",
    "sampling",
    "discarded",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in canonical form (see ``messages.py``), not yet rendered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    row_ref: str
    row_id: str | None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A prompt and the target's response as ids, int64 [p] and [r], both non-empty."""

    prompt_ids: npt.NDArray[np.int64]
    response_ids: npt.NDArray[np.int64]
    greedy: bool
    row_ref: str
    messages: list[Message] | None
    tools: list[dict[str, Any]] | None


Record = Conversation | TokenRecord
Row = tuple[str, dict[str, Any] | RowDropped]


def read_source(config: SourceConfig, drops: DropLog) -> Iterator[Record]:
    """Read the records of one source, in file order.

    Args:
        config: path, filters and limit; the limit counts records, not rows.
        drops: receives every row that matched the filters and could not be used.

    Raises:
        DataError: the file is missing or unreadable, or holds no usable row.
    """
    if not config.path.is_file():
        raise DataError(f"source '{config.name}': {config.path} is not a file; check its path")
    rows = _jsonl_rows if config.path.suffix == ".jsonl" else _parquet_rows
    found = seen = 0
    for where, row in rows(config):
        seen += 1
        try:
            if isinstance(row, RowDropped):
                raise row
            if not _matches(row, config.where):
                continue
            record = _record(row, where)
        except RowDropped as dropped:
            drops.add(dropped, where)
            continue
        yield record
        found += 1
        if found == config.limit:
            return
    if not found:
        raise DataError(_nothing_found(config, drops, seen))


def _nothing_found(config: SourceConfig, drops: DropLog, seen: int) -> str:
    start = f"source '{config.name}': {config.path} has no usable row"
    if not seen:
        return f"{start}: the file is empty"
    if drops.total:
        return f"{start}; dropped {drops.describe()}"
    return f"{start}: none of {seen} rows matches where = {config.where}"


def _matches(row: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(key in row and row[key] == value for key, value in where.items())


def _jsonl_rows(config: SourceConfig) -> Iterator[Row]:
    """Lines of a JSONL file; blank ones are skipped."""
    with config.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{config.path} line {number}", _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | RowDropped:
    # Only a file's last line can lack its newline.
    broken = "unfinished_last_line" if not line.endswith(b"\n") else None
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        return RowDropped(broken or "not_utf8", str(exc))
    except (json.JSONDecodeError, RecursionError) as exc:
        return RowDropped(broken or "invalid_json", str(exc))
    if not isinstance(value, dict):
        return RowDropped("not_an_object", f"found {type(value).__name__}")
    return value


def _parquet_rows(config: SourceConfig) -> Iterator[Row]:
    """Rows of a Parquet file, read batch by batch and only the columns that are used."""
    try:
        file = pq.ParquetFile(config.path)
    except (pa.ArrowInvalid, OSError) as exc:
        raise DataError(
            f"source '{config.name}': {config.path} is not a readable Parquet file "
            f"({_one_line(exc)})"
        ) from None
    columns = _columns(config, file.schema_arrow.names)
    index = 0
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            for row in _batch_rows(batch):
                yield f"{config.path} row {index}", row
                index += 1
    except (pa.ArrowInvalid, OSError) as exc:
        raise DataError(
            f"source '{config.name}': {config.path} cannot be read after row {index} "
            f"({_one_line(exc)})"
        ) from None
    finally:
        file.close()


def _columns(config: SourceConfig, names: list[str]) -> list[str]:
    """The columns to read."""
    start = f"source '{config.name}': {config.path} has columns {names}"
    unknown = sorted(set(config.where) - set(names))
    if unknown:
        raise DataError(f"{start}, where names {unknown}")
    if _CHAT_COLUMNS.isdisjoint(names) and not _ID_COLUMNS.issubset(names):
        raise DataError(
            f"{start}: it needs messages, conversations, or both prompt_ids and response_ids"
        )
    return [name for name in names if name in _COLUMNS or name in config.where]


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows as dicts; integer lists stay numpy arrays, other values become Python objects."""
    columns = {
        name: _int_lists(column) if _is_int_list(column.type) else map(_prune, column.to_pylist())
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _is_int_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def _int_lists(column: pa.Array) -> Iterable[Any]:
    for item in column:
        if not item.is_valid:
            yield None
        elif item.values.null_count:
            yield item.as_py()
        else:
            yield item.values.to_numpy()


def _prune(value: Any) -> Any:
    """Remove nulls inside structs: Parquet fills every row's struct with the keys of all rows."""
    if isinstance(value, dict):
        return {key: _prune(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_prune(inner) for inner in value]
    return value


def _record(row: dict[str, Any], where: str) -> Record:
    if row.get("discarded"):
        raise RowDropped("discarded_response", str(row["discarded"]))
    if row.get("prompt_ids") is not None and row.get("response_ids") is not None:
        return _token_record(row, where)
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            messages = _with_system(normalise_messages(row[key]), row.get("system"))
            row_id = row.get("id")
            return Conversation(
                messages=messages,
                tools=normalise_tools(row.get("tools")),
                row_ref=where,
                row_id=None if row_id is None else str(row_id),
            )
    raise RowDropped("no_messages", f"columns {sorted(row)}")


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    """Put a separate ``system`` column in front, unless the conversation has its own."""
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _token_record(row: dict[str, Any], where: str) -> TokenRecord:
    prompt_ids, response_ids = _ids(row["prompt_ids"]), _ids(row["response_ids"])
    if not len(prompt_ids):
        raise RowDropped("empty_prompt")
    if not len(response_ids):
        raise RowDropped("empty_response")
    try:
        # The ids are the sample; the messages only tell its mode, so they may be unreadable.
        messages = None if row.get("messages") is None else normalise_messages(row["messages"])
        tools = normalise_tools(row.get("tools"))
    except RowDropped:
        messages = tools = None
    greedy = _is_greedy(row.get("sampling"))
    return TokenRecord(prompt_ids, response_ids, greedy, where, messages, tools)


def _ids(value: Any) -> npt.NDArray[np.int64]:
    if isinstance(value, np.ndarray):
        array = value.astype(np.int64)
    elif isinstance(value, list) and all(type(item) is int for item in value):
        try:
            array = np.array(value, dtype=np.int64)
        except OverflowError as exc:
            raise RowDropped("ids_not_integers", str(exc)) from None
    else:
        raise RowDropped("ids_not_integers", f"found {str(value)[:40]}")
    if array.size and array.min() < 0:
        raise RowDropped("ids_not_integers", f"found {array.min()}")
    return array


def _is_greedy(sampling: Any) -> bool:
    if isinstance(sampling, dict):
        return sampling.get("temperature") == 0
    return sampling == "greedy"
