"""Start training under the DeepSpeed launcher on this machine, after everything cheap was checked.

The launcher gets a free port (its own default collides when two runs share a machine) and a PATH
that holds this Python's scripts, which DeepSpeed needs to find ninja. Several nodes are started by
the cluster's own launcher with ``drafttrain/train.py``.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

from .drafter.resolve import resolve_config
from .engine import accumulation_steps
from .features import features_meta
from .losses.weights import resolve_gamma
from .metrics_log import check_loggers
from .recipe import Recipe

TRAIN_SCRIPT = Path(__file__).with_name("train.py")
RATE_FILE = "train_rate.json"  # in the output folder, of a run that only measures


def launch_training(
    recipe: Recipe,
    path: Path,
    overrides: tuple[str, ...],
    ranks: int | None,
    measure_s: float | None = None,
) -> int:
    """Check, launch, wait; returns the launcher's exit code.

    Args:
        recipe: of the run.
        path: the recipe's file, for the training processes.
        overrides: as given with it.
        ranks: processes on this machine; None is one per GPU.
        measure_s: time steps for so long and write ``RATE_FILE`` instead of training.

    Raises:
        DraftTrainError: before any process starts, when the recipe does not fit its stores.
    """
    import torch

    cuda = torch.cuda.is_available()
    ranks = ranks or (torch.cuda.device_count() if cuda else 1)
    accumulation_steps(recipe.train, ranks)
    check_loggers(recipe.train.loggers)
    config = resolve_config(recipe.drafter, features_meta(recipe))
    resolve_gamma(recipe.train.gamma, config.block_size)
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    if not cuda:
        environment["DS_ACCELERATOR"] = "cpu"
        # Without a limit every rank would start one thread per core.
        threads = max(1, (os.cpu_count() or 1) // ranks)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "-q",
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
        str(TRAIN_SCRIPT),
        "--recipe",
        str(path),
        *(["--measure", str(measure_s)] if measure_s else []),
        *overrides,
    ]
    return subprocess.call(command, env=environment)


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
