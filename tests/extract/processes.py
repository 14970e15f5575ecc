"""Extractions in real processes that can be killed, stopped and run beside one another."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .kill_server import HUNG

SERVER = Path(__file__).with_name("kill_server.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Server:
    """Forks extractions of one table with one target on demand.

    Args:
        target: its folder.
        table: the sample table.
        errors: a folder for what the extractions die of.
    """

    def __init__(self, target: Path, table: Path, errors: Path) -> None:
        self._inputs = {"target": str(target), "table": str(table)}
        self._errors, self._numbers = errors, itertools.count()
        errors.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Path] = {}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def _ask(self, request: dict[str, Any]) -> int:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, out: Path, **options: Any) -> int:
        """Begin an extraction; its process id. Options are those of ``kill_server.run``."""
        errors = self._errors / f"{next(self._numbers)}.txt"
        request = {**self._inputs, "out": str(out), "errors": str(errors), **options}
        pid = self._ask({"start": request})
        self._files[pid] = errors
        return pid

    def wait(self, pid: int) -> tuple[int, str]:
        """The exit code of an extraction, negative for a signal, and what it died of."""
        status = self._ask({"wait": pid})
        errors = self._files.pop(pid)
        text = errors.read_text() if errors.exists() else ""
        return status if status == HUNG else os.waitstatus_to_exitcode(status), text

    def run(self, out: Path, **options: Any) -> tuple[int, str]:
        """Extract; exit code and error."""
        return self.wait(self.start(out, **options))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def lasting(folder: Path) -> list[Path]:
    """Files under their final names."""
    return [path for path in folder.glob("*") if path.suffix not in (".tmp", ".claim")]


def wait_for_files(folder: Path, count: int, pattern: str = "", seconds: float = 60) -> None:
    """Return once a folder holds so many files, of a pattern or under their final names.

    Moments are better chosen by progress than by the clock: a slow machine has them too.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if len(list(folder.glob(pattern)) if pattern else lasting(folder)) >= count:
            return
        time.sleep(0.0005)
    raise TimeoutError(f"{folder} never held {count} files {pattern}")
