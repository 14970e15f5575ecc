"""The training log: one JSON line per optimizer step, and the same scalars for TensorBoard.

On resume the log is cut back to the checkpoint's step, so it reads as if never interrupted.
"""

import json
from pathlib import Path
from typing import Any

from drafttrain.data.files import write_text


class MetricsLog:
    """Append-only log of one run (rank 0 only).

    Args:
        folder: the run's output folder; writes ``metrics.jsonl`` and ``tensorboard/``.
        done: optimizer steps already in the checkpoint that training continues from.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= done]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Log one step; numbers also go to TensorBoard."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.scalars(line["step"], {f"train/{k}": v for k, v in line.items() if k != "step"})

    def scalars(self, step: int, values: dict[str, Any]) -> None:
        """TensorBoard only."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush both."""
        self._file.close()
        self._board.close()


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
