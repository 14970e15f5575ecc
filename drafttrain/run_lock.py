"""One writer per run folder, enforced by the kernel: a lock dies with its process.

Killing a launcher can leave its ranks alive; a second start must not write beside them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafttrain.data.errors import DraftTrainError
from drafttrain.data.files import try_lock


@contextmanager
def hold_run(folder: Path, work: str, rank: int = 0) -> Iterator[None]:
    """Hold the folder's lock for one kind of work (rank 0 of a run; others pass through).

    Raises:
        DraftTrainError: another live process holds it; its process id is named.
    """
    if rank != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{work}.lock"
    with path.open("a+") as file:
        if not try_lock(file):
            file.seek(0)
            raise DraftTrainError(
                f"process {file.read().strip() or '?'} is already {work} in {folder}: wait for it "
                "or end it, then run the same command again"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
