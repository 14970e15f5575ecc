"""A sample table in training order: position -> sample, epoch after epoch.

``Stream`` looks like the table itself, so a rolling store is extracted, planned and read as the
store of a table whose rows are the positions of the training stream. Cost: 16 bytes a position.
"""

import numpy as np
import numpy.typing as npt

from .order import stream_order
from .samples import Sample, SampleTable


class Stream:
    """The samples of a table in the order in which training sees them.

    Args:
        table: the samples.
        seed: of the training order.
        positions: how many, over all epochs.

    Attributes:
        seed: as given.
        table_hash: of the table.
        manifest: of the table.
        lengths: int64 [positions], tokens at each position.
    """

    def __init__(self, table: SampleTable, seed: int, positions: int) -> None:
        self._table = table
        self._order = stream_order(len(table), seed, positions)
        self.seed, self.table_hash, self.manifest = seed, table.table_hash, table.manifest
        self.lengths: npt.NDArray[np.int64] = table.lengths[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> Sample:
        return self._table[int(self._order[position])]
