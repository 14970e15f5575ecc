"""The progress line of extraction: tokens done, tokens per second, time left, or who is waited for.

Only work of this worker is counted, so its rate is right in a resumed run and beside other workers.
The line is written to stderr, and only where that is a terminal; log files get one line per shard
from the worker, and one whenever it waits for others than before.
"""

import logging
from collections import defaultdict

from rich.progress import ProgressColumn, Task, TextColumn
from rich.text import Text

from drafttrain.data.progress import make_progress

_LOGGER = logging.getLogger(__name__)


class _Rate(ProgressColumn):
    """Tokens per second since the task began."""

    def render(self, task: Task) -> Text:
        rate = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{rate:,.0f} tokens/s")


class ExtractionProgress:
    """A progress display whose unit is the token; use as a context manager.

    Args:
        name: of the store.
    """

    def __init__(self, name: str) -> None:
        self._name = f"extract {name}"
        self._bar = make_progress(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"), _Rate()
        )
        self._task = self._bar.add_task(self._name, total=0)
        self._done = self._total = 0
        self._waiting = ""

    def __enter__(self) -> "ExtractionProgress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, tokens: int) -> None:
        """Count states that have come from the target."""
        self._done += tokens
        self._waiting = ""
        self._bar.update(self._task, completed=self._done, description=self._name)

    def waiting(self, whom: dict[str, str]) -> None:
        """Show that nothing is left but what others do.

        Args:
            whom: unit of work -> who does it.
        """
        units = defaultdict(list)
        for unit, who in sorted(whom.items()):
            units[who].append(unit)
        text = ", ".join(f"{who} ({', '.join(names)})" for who, names in units.items())
        if text and text != self._waiting:
            _LOGGER.info("%s: waiting for %s", self._name, text)
            self._bar.update(self._task, description=f"{self._name}: waiting for {text}")
        self._waiting = text or self._waiting

    def expect(self, tokens: int) -> None:
        """Add to what this worker may have to do; less than 0 for what another one has done."""
        self._total += tokens
        self._bar.update(self._task, total=max(self._total, self._done))

    def remaining(self, tokens: int) -> None:
        """Replace what is left to do from here on."""
        self._total = self._done
        self.expect(tokens)
