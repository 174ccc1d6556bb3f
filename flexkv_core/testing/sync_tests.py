"""The conformance kit for syncs: every rank gives its own values and gets the same answer.

class TestMine(SyncTests):
    def open_world(self, size): ...      # one Sync a rank; each is then used by a thread of its own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from flexkv_core.sync import Sync

from .kit import Crew, Kit

T = TypeVar("T")


class SyncTests(Kit):
    """Every test that a sync must pass.

    Attributes:
        sizes: World sizes to try.
    """

    sizes: tuple[int, ...] = (1, 2, 3)

    def open_world(self, size: int) -> list[Sync]:
        """The ranks of a world of ``size``, in order."""
        raise NotImplementedError("the kit's user gives open_world(size)")

    def _ask(self, world: list[Sync], ask: Callable[[Sync], T]) -> list[T]:
        """What every rank answers, asked at once."""
        answers: dict[int, T] = {}
        crew = Crew(self.deadline_s)
        crew.start(len(world), lambda rank: answers.update({rank: ask(world[rank])}))
        crew.join()
        return [answers[rank] for rank in range(len(world))]

    def _worlds(self) -> list[list[Sync]]:
        return [self.open_world(size) for size in self.sizes]

    def test_ranks_are_numbered(self) -> None:
        for world in self._worlds():
            assert [sync.rank for sync in world] == list(range(len(world)))
            assert {sync.size for sync in world} == {len(world)}
            self._ask(world, lambda sync: sync.close())

    def test_smallest_value_of_all_ranks(self) -> None:
        for world in self._worlds():
            size = len(world)
            got = self._ask(world, lambda sync: sync.agree_min([sync.rank, 10 - sync.rank, 7, 1 << 40]))
            assert got == [[0, 11 - size, 7, 1 << 40]] * size
            self._ask(world, lambda sync: sync.close())

    def test_yes_only_if_all_say_so(self) -> None:
        for world in self._worlds():
            size = len(world)
            got = self._ask(world, lambda sync: sync.agree_all([True, False, sync.rank == 0]))
            assert got == [[True, False, size == 1]] * size
            self._ask(world, lambda sync: sync.close())

    def test_nothing_to_agree_on(self) -> None:
        for world in self._worlds():
            assert self._ask(world, lambda sync: (sync.agree_min([]), sync.agree_all([]))) == [
                ([], [])
            ] * len(world)
            self._ask(world, lambda sync: sync.close())

    def test_many_rounds_stay_in_step(self) -> None:
        for world in self._worlds():
            got = self._ask(world, lambda sync: [sync.agree_min([turn + sync.rank])[0] for turn in range(50)])
            assert got == [list(range(50))] * len(world)
            self._ask(world, lambda sync: sync.close())

    @pytest.mark.parametrize("times", [1, 2])
    def test_close_may_be_called_twice(self, times: int) -> None:
        for world in self._worlds():
            for _ in range(times):
                self._ask(world, lambda sync: sync.close())
