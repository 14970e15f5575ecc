"""kill -9 at random moments, then the same command again: the same bytes. (fault kind 33)"""

import contextlib
import json
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
from .processes import ENVIRONMENT, SERVER, Server, lasting, wait_for_files

LENGTHS = [17, 40, 22, 9, 31, 55, 12, 28, 33, 47, 8, 60] * 3


def _extract(server: Server, out: Path, kill_at: int | None = None, delay: float = 0.0) -> int:
    """Extract, killed once the folder has held ``kill_at`` files and ``delay`` seconds went by."""
    pid = server.start(out)
    if kill_at is not None:
        wait_for_files(out, kill_at)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return server.wait(pid)[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return save_target(folder / "target"), make_table(folder / "t.parquet", LENGTHS)


@pytest.fixture(scope="module")
def server(inputs, tmp_path_factory):
    server = Server(*inputs, tmp_path_factory.mktemp("errors"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert _extract(server, folder / "a") == 0
    assert _extract(server, folder / "b") == 0
    assert contents(folder / "a") == contents(folder / "b")
    return contents(folder / "a")


def test_ten_kills_each_followed_by_a_rerun(server, undisturbed, tmp_path):
    rng = random.Random(0)
    killed = halfway = 0
    for attempt in range(10):
        out = tmp_path / f"store{attempt}"
        # One moment in each tenth of the run, so that all of it is covered.
        moment = int(len(undisturbed) * 0.95 * (attempt + rng.random()) / 10)
        status = _extract(server, out, max(moment, 1), delay=rng.uniform(0, 0.003))
        sealed = len(list(out.glob("shard-*.json")))
        killed += status == -signal.SIGKILL
        halfway += 0 < sealed < len(undisturbed) // 3
        assert _extract(server, out) == 0
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
        _extract(server, out, kill_at=files + rng.randint(1, 5), delay=rng.uniform(0, 0.003))
        now = {path.name for path in out.glob("shard-*.json")}
        assert done <= now, "a sealed shard disappeared"
        done, files = now, len(lasting(out))
    assert done
    assert _extract(server, out) == 0
    assert contents(out) == undisturbed


def test_a_fresh_process_killed_and_rerun(inputs, undisturbed, tmp_path):
    out = tmp_path / "store"
    options = dict(zip(("target", "table", "out"), map(str, (*inputs, out)), strict=True))
    command = [sys.executable, str(SERVER), json.dumps(options)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for_files(out, len(undisturbed) // 3)
    process.kill()
    process.wait()
    assert 0 < len(list(out.glob("shard-*.json"))) < len(undisturbed) // 3
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
    assert contents(out) == undisturbed
