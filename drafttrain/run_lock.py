"""One writer per run folder, enforced by the kernel: a lock dies with its process.

Killing a launcher can leave its ranks alive; a second start must not write beside them.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafttrain.data.errors import DraftTrainError


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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise DraftTrainError(
                f"process {file.read().strip() or '?'} is already {work} in {folder}: wait for it "
                "or end it, then run the same command again"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
