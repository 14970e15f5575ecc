"""Shared by the end-to-end tests: one tiny target, one prepared and extracted run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from . import tiny

ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def drafttrain(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """Run the real command line."""
    command = [sys.executable, "-c", "from drafttrain.cli import main; main()", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    """A tiny random target folder."""
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def extracted(tmp_path_factory, target) -> Path:
    """A recipe whose sample tables and stores are finished (do not train into it)."""
    recipe = tiny.make_recipe(tmp_path_factory.mktemp("extracted"), target)
    for verb in (["data", "prepare"], ["extract"]):
        done = drafttrain(*verb, "--recipe", str(recipe))
        assert done.returncode == 0, done.stderr
    return recipe


def kill_group(process: subprocess.Popen) -> None:
    """SIGKILL a process started in its own session, with everything it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
