"""Durable files: what has its final name is complete and on disk.

Everything is written under ``<name>.tmp`` (``<name>.<owner>.tmp`` in a folder that several write
to), flushed with fsync, renamed, and the folder is flushed too, so neither a kill nor a power cut
leaves a short file under a final name (cost: one fsync of the file and one of the folder).
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import xxhash

from .errors import DraftTrainError, StoreError

_READ_BYTES = 1 << 22
_FLUSH_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Result = TypeVar("_Result")


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_flush(fd: int, offset: int, size: int) -> None:
    """Let the system begin writing a part of an open file to the disk; returns at once.

    Without it the disk idles until the final flush. Does nothing where the system has no such call.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, offset, size, _FLUSH_WRITE)


def try_lock(file: IO[Any]) -> bool:
    """Take the exclusive lock of an open file; False if another live process holds it.

    The kernel drops the lock when the file is closed or the process ends, however it ends.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _confirmed() -> None:
    """A folder's only writer may always publish."""


def publish(
    path: Path,
    write: Callable[[Path], _Result],
    owner: str = "",
    confirm: Callable[[], None] = _confirmed,
) -> _Result:
    """Create ``path`` atomically.

    Args:
        path: the final name.
        write: gets the temporary path and must create it; what it returns is returned.
        owner: makes the temporary name unique where several processes write to one folder.
        confirm: called just before the renaming; raises if the file must not appear any more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + (f".{owner}.tmp" if owner else ".tmp"))
    result = write(tmp)
    fsync_path(tmp)
    confirm()
    os.replace(tmp, path)
    fsync_path(path.parent)
    return result


@contextmanager
def no_space_explained(folder: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Say what a disk, quota or file size limit that ends the body means for a store.

    Args:
        folder: the store that is written.
        kept: what is there by now and stays.

    Raises:
        StoreError: a limit is reached; other errors pass as they are.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno not in _NO_SPACE:
            raise
        raise StoreError(
            f"{folder}: the disk is full or a limit is reached ({exc.strerror}); {kept()} are kept:"
            " free space and rerun the same command"
        ) from exc


def write_text(
    path: Path, text: str, owner: str = "", confirm: Callable[[], None] = _confirmed
) -> None:
    """Write a text file atomically; see ``publish``."""
    publish(path, lambda tmp: _write(tmp, text), owner, confirm)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_json(
    path: Path, value: Any, owner: str = "", confirm: Callable[[], None] = _confirmed
) -> None:
    """Write indented JSON atomically, keys in the order given; see ``publish``."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", owner, confirm)


def read_json(path: Path, error: type[DraftTrainError], remedy: str) -> dict[str, Any]:
    """Read a JSON object; a missing or malformed file raises ``error`` with the remedy."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} does not exist: {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise error(f"{path} is not valid JSON ({exc}): {remedy}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds {type(value).__name__}, not a JSON object: {remedy}")
    return value


def file_checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes, hex; about as fast as the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def content_hash(value: Any) -> str:
    """sha256 (first 16 hex digits) of a JSON-serialisable value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
