"""How long work looks on a terminal: a bar with time left, on stderr, and nothing in a log file.

Stages that run for long also log a line now and then, for the log files.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True)

_Item = TypeVar("_Item")


def make_progress(*columns: ProgressColumn, enabled: bool = True) -> Progress:
    """A progress bar, shown only where ``enabled`` and on a terminal.

    Args:
        columns: between the bar and the times; unset means done and total.
        enabled: e.g. False on all ranks but the first.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(columns or (MofNCompleteColumn(),)),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not (enabled and console.is_terminal),
    )


def tracked(items: Sequence[_Item], description: str, enabled: bool = True) -> Iterator[_Item]:
    """Iterate with a progress bar that disappears at the end."""
    with make_progress(enabled=enabled) as progress:
        task = progress.add_task(description, total=len(items))
        for item in items:
            yield item
            progress.advance(task)
        progress.remove_task(task)
