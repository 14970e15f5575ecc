"""What is shown of each optimizer step: a progress bar, the training log, now and then a line.

Only rank 0 has one. A terminal gets the bar; a log file, which has none, a line every half minute.
"""

import logging
import time
from types import TracebackType
from typing import Any

from drafttrain.data.progress import console, make_progress

from .metrics_log import MetricsLog
from .recipe import Recipe

_LOGGER = logging.getLogger(__name__)
_SAY_EVERY_S = 30.0


class StepReport:
    """Use as a context manager around the steps.

    Args:
        recipe: of the run; the log goes to its output folder.
        done: steps that are done already.
        total: steps of the whole training.
        enabled: whether this rank reports; if not, nothing happens.
    """

    def __init__(self, recipe: Recipe, done: int, total: int, enabled: bool) -> None:
        self._total = total
        self._log = MetricsLog(recipe, done) if enabled else None
        self._progress = make_progress(enabled=enabled)
        self._task = self._progress.add_task("training", total=total, completed=done)
        self._said = time.monotonic()

    def __enter__(self) -> "StepReport":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._log is not None:
            self._log.close()

    def step(self, line: dict[str, Any]) -> None:
        """Show and log one step."""
        if self._log is None:
            return
        shown = (
            f"loss {line['loss']:.3f}  slot 1 {line['first_slot_accuracy']:.1%}  "
            f"blocks {line['expected_accepted_length']:.2f}  "
            f"{line['tokens_per_s']:.0f} tok/s"
        )
        self._progress.update(self._task, advance=1, description=f"training  {shown}")
        self._log.write(line)
        if not console.is_terminal and time.monotonic() - self._said >= _SAY_EVERY_S:
            self._said = time.monotonic()
            left = self._progress.tasks[self._task].time_remaining
            _LOGGER.info(
                "step %d of %d  %s  %s left",
                line["step"],
                self._total,
                shown,
                "?" if left is None else f"{left:.0f} s",
            )

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        """Numbers of an evaluation, for the loggers."""
        if self._log is not None:
            self._log.scalars(step, numbers)
