"""The append-only file of regenerated responses: one JSON object per line, resumable by id.

A line is either a response, ready to be a source of the data stage,

    {"id", "messages", "tools"?, "prompt_ids", "response_ids", "finish", "sampling"}

or a tombstone, ``{"id", "discarded": reason}``: this prompt was tried and is not tried again; the
data stage skips it. ``<name>.settings.json`` beside it names what decided the responses, so that a
file never mixes two targets, templates or temperatures.

Guarantee: after a kill at any moment the file holds every response that was acknowledged, at worst
with a half-written last line, which the next run removes and redoes; one writer at a time.
Cost: one write per response, one fsync a second.
"""

import json
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from .errors import DataError
from .files import read_json, try_lock, write_json

log = logging.getLogger(__name__)

_FSYNC_SECONDS = 1.0


class ResponseLog:
    """Context manager over an output file.

    Attributes:
        done: ids that need no further work (responses and tombstones).
        responses: how many of them are responses.

    Args:
        path: the ``.jsonl`` file, created if missing.
        settings: what decides the responses; must be what the existing file was made with.

    Raises:
        DataError: other settings, a damaged line that is not the last, or another writer.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self.done: set[str] = set()
        self.responses = 0
        self._file: BinaryIO | None = None
        self._synced = 0.0

    def __enter__(self) -> "ResponseLog":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        try:
            self._lock(self._file)
            self._check_settings()
            self._scan(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        self._sync(self._file)
        self._file.close()

    def append(self, record: dict[str, Any]) -> None:
        """Write one response or tombstone."""
        assert self._file is not None and record["id"] not in self.done, record["id"]
        line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        self._file.write(line)
        self._file.flush()
        if time.monotonic() - self._synced > _FSYNC_SECONDS:
            self._sync(self._file)
        self.done.add(record["id"])
        self.responses += "discarded" not in record

    def _sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        self._synced = time.monotonic()

    def _lock(self, file: BinaryIO) -> None:
        if not try_lock(file):
            raise DataError(
                f"{self._path} is being written by another process: wait for it or stop it"
            )

    def _check_settings(self) -> None:
        path = self._path.with_name(f"{self._path.stem}.settings.json")
        if self._path.stat().st_size == 0:
            write_json(path, self._settings)
            return
        remedy = f"remove {self._path} or choose another output"
        found = read_json(path, DataError, remedy)
        for key, value in self._settings.items():
            if found.get(key) != value:
                raise DataError(
                    f"{self._path} was made with {key} = {found.get(key)!r}, now it is {value!r}: "
                    f"{remedy}"
                )

    def _scan(self, file: BinaryIO) -> None:
        """Collect the ids that are done; cut off a half-written last line."""
        file.seek(0)
        complete = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                log.warning("%s line %d is half-written: removed and redone", self._path, number)
                break
            complete += len(line)
            if line.strip():
                self._note(line, number)
        file.truncate(complete)
        file.seek(0, os.SEEK_END)

    def _note(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line)
            prompt_id, discarded = record["id"], "discarded" in record
        except (ValueError, TypeError, KeyError) as exc:
            raise DataError(
                f"{self._path} line {number} is not a response ({type(exc).__name__}: {exc}): "
                "the file was edited or damaged; delete that line to have it redone"
            ) from None
        if prompt_id in self.done:
            raise DataError(f"{self._path} line {number} repeats id {prompt_id!r}: delete the line")
        self.done.add(prompt_id)
        self.responses += not discarded
