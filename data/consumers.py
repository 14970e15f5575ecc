"""How far the readers of a rolling store are: one small file per reader, written by it alone.

    consumer-<name>.json   {"position": P, "until": U}

``position``: the reader needs nothing before it any more. It goes back when a reader was killed and
continues from a checkpoint. ``until``: where it ends. Guarantee: a file is whole or absent (atomic
rename), so extraction on another machine never acts on half a number.
"""

from pathlib import Path
from typing import NamedTuple

from .errors import StoreError
from .files import content_hash, read_json, write_json

_PREFIX = "consumer-"


class Consumer(NamedTuple):
    """What one reader of a rolling store says of itself."""

    position: int
    until: int

    @property
    def done(self) -> bool:
        """Whether it needs nothing any more."""
        return self.position >= self.until


def consumer_name(output: Path) -> str:
    """The name of the run that writes to an output folder."""
    return f"{output.name}-{content_hash(str(output.absolute()))[:8]}"


def report_consumer(folder: Path, name: str, consumer: Consumer, owner: str) -> None:
    """Say how far a reader is.

    Args:
        folder: the rolling store.
        name: of the reader.
        consumer: what it needs.
        owner: of the temporary file, so that others know whether its writer lives.
    """
    write_json(folder / f"{_PREFIX}{name}.json", consumer._asdict(), owner)


def read_consumers(folder: Path) -> dict[str, Consumer]:
    """Every reader that has ever reported, by name.

    Raises:
        StoreError: a file was altered by hand.
    """
    found = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        remedy = "remove it, then start the training run that it is named after again"
        value = read_json(path, StoreError, remedy)
        try:
            consumer = Consumer(int(value["position"]), int(value["until"]))
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{path} holds {value}, not a position: {remedy}") from None
        found[path.stem.removeprefix(_PREFIX)] = consumer
    return found
