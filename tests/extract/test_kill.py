"""kill -9 at random moments, then the same command again: the same bytes. (fault kind 33)"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafttrain.data.store_check import verify_store

from .factory import contents, make_table, save_target

SERVER = Path(__file__).with_name("kill_server.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
LENGTHS = [17, 40, 22, 9, 31, 55, 12, 28, 33, 47, 8, 60] * 3


class Server:
    """Forks extractions on demand."""

    def __init__(self, target: Path, table: Path) -> None:
        self._inputs = f"{target} {table}"
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def extract(self, out: Path, kill_at: int | None = None, delay: float = 0.0) -> int:
        """Extract and return the wait status.

        Args:
            out: the store.
            kill_at: kill -9 once the folder has held this many files; moments are chosen by
                progress rather than by the clock, so a slow machine has them too.
            delay: seconds to wait then.
        """
        self._process.stdin.write(f"{self._inputs} {out}\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        if kill_at is not None:
            _wait_for_files(out, kill_at)
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _wait_for_files(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if len(os.listdir(folder)) >= count:
                return
        time.sleep(0.0005)
    raise TimeoutError(f"{folder} never held {count} files")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return save_target(folder / "target"), make_table(folder / "t.parquet", LENGTHS)


@pytest.fixture(scope="module")
def server(inputs):
    server = Server(*inputs)
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert server.extract(folder / "a") == 0
    assert server.extract(folder / "b") == 0
    assert contents(folder / "a") == contents(folder / "b")
    return contents(folder / "a")


def test_ten_kills_each_followed_by_a_rerun(server, undisturbed, tmp_path):
    rng = random.Random(0)
    killed = halfway = 0
    for attempt in range(10):
        out = tmp_path / f"store{attempt}"
        # One moment in each tenth of the run, so that all of it is covered.
        moment = int(len(undisturbed) * 0.95 * (attempt + rng.random()) / 10)
        status = server.extract(out, max(moment, 1), delay=rng.uniform(0, 0.003))
        sealed = len(list(out.glob("shard-*.json")))
        killed += status == signal.SIGKILL
        halfway += 0 < sealed < len(undisturbed) // 3
        assert server.extract(out) == 0
        assert contents(out) == undisturbed
        verify_store(out)
    assert killed >= 8
    assert halfway >= 4


def test_ten_kills_of_one_store(server, undisturbed, tmp_path):
    rng = random.Random(1)
    out = tmp_path / "store"
    done: set[str] = set()
    files = 0
    for _ in range(10):
        server.extract(out, kill_at=files + rng.randint(1, 5), delay=rng.uniform(0, 0.003))
        now = {path.name for path in out.glob("shard-*.json")}
        assert done <= now, "a sealed shard disappeared"
        done, files = now, sum(path.suffix != ".tmp" for path in out.iterdir())
    assert done
    assert server.extract(out) == 0
    assert contents(out) == undisturbed


def test_a_fresh_process_killed_and_rerun(inputs, undisturbed, tmp_path):
    out = tmp_path / "store"
    command = [sys.executable, str(SERVER), *map(str, inputs), str(out)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    _wait_for_files(out, len(undisturbed) // 3)
    process.kill()
    process.wait()
    assert 0 < len(list(out.glob("shard-*.json"))) < len(undisturbed) // 3
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
    assert contents(out) == undisturbed
