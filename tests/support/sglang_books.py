"""The books of the scheduler model in ``sglang_world``: who owns which slot, who holds which lock."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv_sglang import compat

from . import sglang_dialect as dialect
from .sglang_device import kv_rows

if TYPE_CHECKING:
    from .sglang_world import Job


class Books:
    """What must be so after every step of a scheduler."""

    page: int
    size: int
    cache: Any
    allocator: Any
    rows: Any
    planes: list[np.ndarray[Any, Any]]

    @abstractmethod
    def open_jobs(self) -> list[Job]:
        """Requests that have not ended."""

    def check_rows(
        self,
        slots: np.ndarray[Any, Any],
        hashes: Sequence[int],
        what: str,
        planes: Sequence[int] | None = None,
    ) -> None:
        """The device's slots hold exactly what the model computed, in all planes or some."""
        for number in range(len(self.planes)) if planes is None else planes:
            plane = self.planes[number]
            wrong = (plane[slots] != kv_rows(hashes, number, plane.shape[1])).any(axis=1).nonzero()[0]
            if len(wrong):
                raise AssertionError(f"{what} wrong KV at tokens {wrong[:8].tolist()}, plane {number}")

    def check_tree(self, job: Job, num_tokens: int) -> None:
        """The tree holds the first ``num_tokens`` tokens of the request, byte for byte."""
        key = compat.prompt_key(job.req, num_tokens)
        found = compat.types().RadixCache.match_prefix(self.cache, compat.types().MatchPrefixParams(key=key))
        assert compat.match_device_len(found) == num_tokens // self.page * self.page
        slots = compat.path_slots(self.cache, found.last_device_node).numpy()
        self.check_rows(slots, job.hashes_to(len(slots)), f"the tree of {job.req.rid} has")

    def check(self) -> None:
        """Every slot has one owner, every lock one holder, and SGLang's idle check would pass."""
        cache = self.cache
        live = {id(j): j for j in self.open_jobs() if dialect.holds_kv(j.req)}
        own: list[int] = []
        for job in live.values():
            own_part = slice(compat.protected_len(job.req), job.req.kv.kv_allocated_len)
            row = self.rows.req_to_token[compat.request_row(job.req), own_part]
            own += self._whole_pages(row.tolist())
        ours: list[int] = []
        for load in cache._loads.open.values():
            ours += load.slots.tolist() if load.slots is not None else []
        for _, slots in cache._quarantine.entries:
            ours += slots.tolist()
        tree, nodes = self._tree()
        free = self._free()
        owners = Counter(free + tree + own + ours)
        twice = [slot for slot, count in owners.items() if count > 1]
        assert not twice, f"slots with two owners: {twice[:10]}"
        assert len(owners) == self.size, f"{self.size - len(owners)} slots without an owner"
        assert len(free) == self.allocator.available_size()
        assert cache.evictable_size() + cache.protected_size() == len(tree) + len(ours), "the tree's sums"
        total = self.allocator.available_size() + cache.evictable_size() + cache.protected_size()
        assert total + len(own) == self.size, "SGLang's idle check would fail"
        self._check_locks(nodes, list(live.values()))

    def _check_locks(self, nodes: list[Any], live: list[Job]) -> None:
        held: Counter[int] = Counter()
        holders = [load.node for load in self.cache._loads.open.values()]
        holders += [store.node for store in self.cache._stores.open]
        if self.cache._layerwise is not None:
            holders += self.cache._layerwise.holders
        holders += [job.req.last_node for job in live if dialect.is_locked(job.req)]
        for node in holders:
            while node is not self.cache.root_node:
                held[id(node)] += 1
                node = node.parent
        for node in nodes:
            assert node.lock_ref == held[id(node)], f"{node.lock_ref} locks, {held[id(node)]} holders"

    def _whole_pages(self, slots: list[int]) -> list[int]:
        pages = dict.fromkeys(slot // self.page for slot in slots)
        return [page * self.page + i for page in pages for i in range(self.page)]

    def _free(self) -> list[int]:
        pages = dialect.free_pages(self.allocator)
        return [page * self.page + i for page in pages for i in range(self.page)]

    def _tree(self) -> tuple[list[int], list[Any]]:
        slots: list[int] = []
        nodes: list[Any] = []
        todo = list(self.cache.root_node.children.values())
        while todo:
            node = todo.pop()
            nodes.append(node)
            slots += node.value.tolist()
            todo += node.children.values()
        return slots, nodes
