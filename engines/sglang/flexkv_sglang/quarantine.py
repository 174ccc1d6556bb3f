"""Quarantine: device slots that nobody waits for any more, while a copy may still touch them.

Threads: the scheduler's only.
"""

from __future__ import annotations

from typing import Any

import torch

from flexkv_core.manager import KVManager

from . import compat


class Quarantine:
    """Slots that are neither in the tree nor free; SGLang's books count them as protected.

    Attributes:
        entries: The task whose copy may touch them, and the slots: 1-D int64 on the device.
    """

    def __init__(self, tree: Any, manager: KVManager) -> None:
        """Empty; slots go back to the allocator of ``tree``."""
        self.entries: list[tuple[int, torch.Tensor]] = []
        self._tree = tree
        self._manager = manager

    @property
    def num_tokens(self) -> int:
        """How many slots there are."""
        return sum(len(slots) for _, slots in self.entries)

    @property
    def tasks(self) -> list[int]:
        """Whose copies they are."""
        return [task for task, _ in self.entries]

    def add(self, task: int, slots: torch.Tensor) -> None:
        """They are free once the task is over; see ``release``."""
        if len(slots):
            self.entries.append((task, slots))

    def release(self) -> None:
        """Free what no copy can touch any more."""
        still = []
        for task, slots in self.entries:
            if self._manager.is_over(task):
                self._manager.try_wait([task])
                compat.free_slots(self._tree, slots)
            else:
                still.append((task, slots))
        self.entries = still
        self._manager.metrics.gauge("quarantined_slots", self.num_tokens)
