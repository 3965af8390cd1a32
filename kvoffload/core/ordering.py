"""Who must wait for whom, among transfers.

Every job has a number, and numbers only grow. For each lane the table holds, of every block and
chunk, the number of the lane's newest job that touches it. A lane runs its jobs in order, so the
newest implies the older ones, and a job that has ended needs no clean-up: its number is simply
looked up in vain.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.specs import IntArray


class OrderingTable:
    """What was touched last, by which job.

    Args:
        lanes: how many there are.
        resources: how many blocks and chunks there are, on both sides together.
    """

    def __init__(self, lanes: int, resources: int) -> None:
        self._last = np.zeros((lanes, resources), dtype=np.int64)
        self._writer = np.zeros(resources, dtype=np.int64)

    def dependencies(self, lane: int, reads: IntArray, writes: IntArray) -> list[int]:
        """For each lane the newest job that shares a resource; 0 where there is none.

        The job's own lane is left out: it is in order anyway.
        """
        # Of all lanes at once: few calls of numpy, since each costs more than what it works on.
        newest: list[int] = np.maximum(
            self._last[:, reads].max(axis=1, initial=0),
            self._last[:, writes].max(axis=1, initial=0),
        ).tolist()
        newest[lane] = 0
        return newest

    def writers(self, reads: IntArray, since: int) -> list[int]:
        """Jobs with a number above ``since`` that were the last to write one of ``reads``."""
        writers = self._writer[reads]
        recent = writers[writers > since]
        return np.unique(recent).tolist() if len(recent) else []

    def add(self, lane: int, number: int, reads: IntArray, writes: IntArray) -> None:
        """The job touches these, from now on."""
        self._last[lane, reads] = number
        self._last[lane, writes] = number
        self._writer[writes] = number
