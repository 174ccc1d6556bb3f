"""Stores of requests: the tree's nodes stay locked until their copies are over.

Threads: the scheduler's only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexkv_core.manager import NO_TASK, Scope

from .connector import FlexKVConnector
from .handover import Checkpoint


@dataclass(eq=False)
class Store:
    """A store whose device slots are locked in the tree."""

    task: int
    node: Any


class RequestStores:
    """The stores under way.

    Attributes:
        open: Those whose copies are not over.
    """

    def __init__(self, tree: Any, connector: FlexKVConnector) -> None:
        """None yet."""
        self.open: list[Store] = []
        self._tree = tree
        self._connector = connector

    @property
    def tasks(self) -> list[int]:
        """Tasks that read the device's slots."""
        return [store.task for store in self.open]

    def begin(self, checkpoint: Checkpoint, scope: Scope) -> None:
        """Copy what the tiers lack of it, in the background."""
        task = self._connector.store_kv(
            checkpoint.handle,
            lambda: checkpoint.tokens,
            checkpoint.num_tokens,
            scope,
            checkpoint.slots,
            is_finished=checkpoint.is_finished,
        )
        if task != NO_TASK:
            self._tree.inc_lock_ref(checkpoint.node)
            self.open.append(Store(task, checkpoint.node))

    def end(self) -> None:
        """Unlock what was read."""
        manager = self._connector.manager
        still = []
        for store in self.open:
            if manager.is_over(store.task):
                manager.try_wait([store.task])
                self._tree.dec_lock_ref(store.node)
            else:
                still.append(store)
        self.open = still

    def abandon(self) -> list[int]:
        """The tree forgets everything: what is read from now on is not its tokens' KV.  Returns tasks."""
        tasks = self.tasks
        for task in tasks:
            self._connector.release(task)
        self.open.clear()
        return tasks
