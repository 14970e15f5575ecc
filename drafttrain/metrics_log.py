"""The training log: one JSON line per optimizer step, and the same numbers for the chosen loggers.

    metrics.jsonl                       every step, always; numbers that are not finite are null
    tensorboard/, wandb, mlflow         as ``train.loggers`` says: steps, and evaluations between

On resume ``metrics.jsonl`` and TensorBoard are cut back to the checkpoint's step, so they read as
if never interrupted; wandb and MLflow get a new run of the same name. Cost: a few milliseconds a
step at most, on rank 0 alone. wandb and MLflow are imported here only when asked for.
"""

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from drafttrain.data.errors import RecipeError
from drafttrain.data.files import write_text

from .recipe import Recipe

_PROJECT = "drafttrain"


class Logger(Protocol):
    """Where numbers are shown."""

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Take numbers of one step."""

    def close(self) -> None:
        """Nothing more will come."""


class _TensorBoard:
    def __init__(self, recipe: Recipe, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(recipe.output / "tensorboard"), purge_step=done + 1)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class _Wandb:
    def __init__(self, recipe: Recipe, done: int) -> None:
        import wandb

        self._run = wandb.init(
            project=_PROJECT,
            name=recipe.output.name,
            dir=str(recipe.output),
            config=recipe.resolved(),
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, recipe: Recipe, done: int) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(_PROJECT)
        mlflow.start_run(run_name=recipe.output.name)
        mlflow.log_dict(recipe.resolved(), "recipe.yaml")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_LOGGERS: dict[str, Callable[[Recipe, int], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
}


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose package is not installed, before anything long starts.

    Raises:
        RecipeError: names the package.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"train.loggers has {name}, which is not installed: `pip install {name}`, or take "
                "it out of the list"
            )


class MetricsLog:
    """Append-only log of one run (rank 0 only).

    Args:
        recipe: of the run; files go to its output folder.
        done: optimizer steps already in the checkpoint that training continues from.
    """

    def __init__(self, recipe: Recipe, done: int) -> None:
        path = recipe.output / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= done]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._loggers: list[Logger] = [_LOGGERS[n](recipe, done) for n in recipe.train.loggers]

    def write(self, line: dict[str, Any]) -> None:
        """Log one step; numbers also go to the loggers, those of a slot by its number."""
        finite = {name: _finite(value) for name, value in line.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {f"train/{k}": v for k, v in finite.items() if isinstance(v, int | float)}
        for slot, accuracy in enumerate(line["slot_accuracy"], start=1):
            numbers[f"train/slot_accuracy/{slot}"] = accuracy
        del numbers["train/step"]
        self.scalars(line["step"], numbers)

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        """Loggers only, such as the numbers of an evaluation."""
        for logger in self._loggers:
            logger.log(step, numbers)

    def close(self) -> None:
        """Flush and end all."""
        self._file.close()
        for logger in self._loggers:
            logger.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a training log; a line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
