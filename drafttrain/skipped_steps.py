"""What becomes of steps whose gradients are not finite: named, counted, and ended when they repeat.

    (step, this rank's samples, which of their losses were finite) -> a log line, or TrainingError

Every rank calls ``skipped`` at the same step, since the norm that decides is the same on all; it
gathers names from all ranks and so costs a collective, on such steps alone. The row of skips is
counted in the process: a resumed run counts anew.
"""

import logging
from collections.abc import Sequence

import torch.distributed as dist

from drafttrain.data.errors import TrainingError

log = logging.getLogger(__name__)


class SkippedSteps:
    """Counts steps skipped in a row.

    Args:
        limit: so many end the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._row: list[tuple[int, list[str]]] = []

    def taken(self) -> None:
        """A step with finite gradients ends the row."""
        self._row.clear()

    def skipped(self, step: int, losses: Sequence[tuple[list[str], bool]]) -> None:
        """Report a skipped step.

        Args:
            step: its number, from 1.
            losses: of each micro-batch of this rank, its sample ids and whether its loss was
                finite.

        Raises:
            TrainingError: on every rank, at the last skip that is allowed; names the samples.
        """
        parts: list = [None] * dist.get_world_size()
        dist.all_gather_object(parts, list(losses))
        every = [(rank, ids, finite) for rank, part in enumerate(parts) for ids, finite in part]
        bad = [ids for _, ids, finite in every if not finite]
        suspects = bad or [ids for _, ids, _ in every]
        self._row.append((step, [name for ids in suspects for name in ids]))
        log.warning(
            "step %d skipped, weights unchanged: %s. Samples: %s",
            step,
            f"{len(bad)} of {len(every)} losses are not finite"
            if bad
            else "all losses are finite, but gradients are not",
            "; ".join(
                f"rank {rank}{'' if finite else ' (not finite)'}: {', '.join(ids)}"
                for rank, ids, finite in every
            ),
        )
        if len(self._row) >= self._limit:
            raise TrainingError(self._message())

    def _message(self) -> str:
        named = "; ".join(f"step {step}: {', '.join(names)}" for step, names in self._row)
        return (
            f"{len(self._row)} steps in a row had gradients that are not finite and were skipped "
            f"({named}). The weights are those before the first of them, and no checkpoint was "
            "touched. Look at these samples (`drafttrain store verify`); if they are sound, lower "
            "train.lr or train.clip, or train in fp32; train.stop_after_skipped allows more"
        )
