"""A debug mode: slots are poisoned when they are handed out, and no store may carry poison.

A row of poison in a stored block means that its slot was read before anybody wrote it, or after it was given
to somebody else.  The block is not published then: its copy counts as failed.

Threads: ``poison`` the engine's; the check runs on the thread that ends the copy.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from ..buffers import HostRegion
from ..errors import TransferError
from ..metrics import Metrics
from ..transfer import CopyJob, Fence, Ticket, Transfer
from .planes import DevicePlanes

logger = logging.getLogger(__name__)

POISON = 0xDB
"""No row of a model's KV is this byte throughout, in any of its types."""


class PoisonedTransfer(Transfer):
    """Another transfer, whose stores are searched for poison."""

    def __init__(self, inner: Transfer, planes: DevicePlanes, metrics: Metrics) -> None:
        """Round ``inner``, which copies to and from ``planes``."""
        self.layout = inner.layout
        self._inner = inner
        self._planes = planes
        self._metrics = metrics

    def poison(self, slots: torch.Tensor) -> None:
        """Overwrite rows of slots that nobody has a right to read, on the current stream."""
        at = slots.to(device=self._planes.device, dtype=torch.int64).reshape(-1)
        for plane in self._planes.planes:
            plane.index_fill_(0, at, POISON)

    def register(self, region: HostRegion) -> None:
        self._inner.register(region)

    def fence(self) -> Fence:
        return self._inner.fence()

    def load(self, job: CopyJob) -> Ticket:
        return self._inner.load(job)

    def store(self, job: CopyJob) -> Ticket:
        ticket = self._inner.store(job)

        def check(num_layers: int) -> None:
            if num_layers == ticket.num_layers and ticket.error is None:
                self._check(ticket)

        ticket.listen(check)
        return ticket

    def is_alive(self) -> bool:
        return self._inner.is_alive()

    def close(self) -> None:
        self._inner.close()

    def _check(self, ticket: Ticket) -> None:
        """Before anybody hears of the end; if it came at once, before anybody has the ticket."""
        bad = sum(self._poisoned(span) for span in ticket.job.spans)
        self._metrics.count("poison_checked_stores")
        if bad:
            self._metrics.count("poison_found", bad)
            number = ticket.job.number
            ticket.error = TransferError(f"copy {number} has read {bad} rows that nobody wrote", job=number)
            logger.error("[FlexKV] %s", ticket.error)

    def _poisoned(self, span: Any) -> int:
        """Rows of one span that are poison throughout."""
        layout, bad = self.layout, 0
        for number, plane in enumerate(layout.planes):
            start = layout.header_bytes + layout.plane_offsets[number] * span.num_tokens
            run = span.slot.view[start + span.first * plane.row_bytes : start + span.last * plane.row_bytes]
            rows = np.frombuffer(run, dtype=np.uint8).reshape(-1, plane.row_bytes)
            bad += int((rows == POISON).all(axis=1).sum())
        return bad


def poison_allocations(allocator: Any, transfer: PoisonedTransfer) -> None:
    """Have every slot that ``allocator`` hands out poisoned before its owner gets it."""
    for name in ("alloc", "alloc_extend", "alloc_decode"):
        plain = getattr(allocator, name, None)
        if plain is not None:
            setattr(allocator, name, _poisoning(plain, transfer))


def _poisoning(plain: Any, transfer: PoisonedTransfer) -> Any:
    def allocate(*args: Any, **kwargs: Any) -> Any:
        slots = plain(*args, **kwargs)
        if isinstance(slots, torch.Tensor):
            transfer.poison(slots)
        return slots

    return allocate
