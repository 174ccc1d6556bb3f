"""Sync: the interface by which ranks agree before they act.

Every rank calls the same methods in the same order, whatever its local state; nothing is acted on
before it is agreed.  ``LocalSync`` is a world of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Sync(ABC):
    """How the ranks that share a prefix tree agree.  Raises SyncError naming missing ranks."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks agree."""

    @abstractmethod
    def agree_min(self, values: Sequence[int]) -> list[int]:
        """Per place the smallest value of all ranks (prefix lengths, block counts)."""

    @abstractmethod
    def agree_all(self, flags: Sequence[bool]) -> list[bool]:
        """Per place whether all ranks say yes (a copy has ended, a load succeeded)."""

    @abstractmethod
    def close(self) -> None:
        """Leave; may be called twice."""


class LocalSync(Sync):
    """One rank, which always agrees with itself."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def agree_min(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def agree_all(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def close(self) -> None:
        return
