"""The progress line of extraction: tokens done, tokens per second, time left.

Only work of this run is counted, so the rate and the time left of a resumed run are right. Written
to stderr, and only where that is a terminal; log files get one line per shard from the worker.
"""

from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from drafttrain.data.progress import make_progress


class _Rate(ProgressColumn):
    """Tokens per second since the task began."""

    def render(self, task: Task) -> Text:
        rate = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{rate:,.0f} tokens/s")


def extraction_progress() -> Progress:
    """A progress display whose unit is the token."""
    return make_progress(
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        _Rate(),
    )


def human_bytes(count: float) -> str:
    """A size in decimal units, as disks are sold: 1234567 -> '1.2 MB'."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
