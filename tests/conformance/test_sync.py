"""Syncs of the core pass the kit for syncs."""

from __future__ import annotations

import threading

from flexkv_core import LocalSync, Sync
from flexkv_core.testing import SyncTests
from tests.support.waiting import DEADLINE_S


class TestLocalSync(SyncTests):
    sizes = (1,)

    def open_world(self, size):
        return [LocalSync() for _ in range(size)]


class ThreadSync(Sync):
    """Ranks that are threads: what the kit's larger worlds are tried with."""

    def __init__(self, rank, barrier, board):
        self._rank, self._barrier, self._board = rank, barrier, board

    @property
    def rank(self):
        return self._rank

    @property
    def size(self):
        return self._barrier.parties

    def _gather(self, values):
        self._board[self._rank] = list(values)
        self._barrier.wait(DEADLINE_S)
        rows = list(zip(*self._board, strict=True))
        self._barrier.wait(DEADLINE_S)
        return rows

    def agree_min(self, values):
        return [min(row) for row in self._gather(values)]

    def agree_all(self, flags):
        return [all(row) for row in self._gather(flags)]

    def close(self):
        return


class TestThreadSync(SyncTests):
    def open_world(self, size):
        barrier, board = threading.Barrier(size), [[] for _ in range(size)]
        return [ThreadSync(rank, barrier, board) for rank in range(size)]
