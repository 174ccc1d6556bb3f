"""A copy job as arrays: every check that can be made before a byte moves is made here.

Nothing here touches device or host memory, and there is no loop over tokens or pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from ..errors import TransferError
from ..layout import BlockLayout
from ..transfer import BlockSpan, CopyJob, HostSpans
from .regions import Int64


@dataclass(frozen=True, eq=False)
class SpanTable:
    """The spans of a job, one entry a span, in the order of the device slots.

    Attributes:
        payload: Address of the block's first payload byte.
        num_tokens: Tokens of the whole block.
        first: First token that moves.
        last: One behind the last.
    """

    payload: Int64
    num_tokens: Int64
    first: Int64
    last: Int64

    def __len__(self) -> int:
        return len(self.payload)

    def end(self, layout: BlockLayout) -> Int64:
        """Where each block's payload ends."""
        return self.payload + self.num_tokens * layout.token_bytes


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The tokens of some spans: row of plane p = ``payload + num_tokens * offset[p] + token * row_bytes[p]``.

    Attributes:
        device_slots: Where each token lies on the device.
        payload: Per token the address (or offset) of its block's payload.
        num_tokens: Per token the tokens of its block.
        token: Per token its place in the block.
    """

    device_slots: Int64
    payload: Int64
    num_tokens: Int64
    token: Int64

    def __len__(self) -> int:
        return len(self.device_slots)

    def at(self, offset: int, row_bytes: int, begin: int, end: int) -> Int64:
        """Where the rows of one plane begin, for tokens ``begin`` to ``end``."""
        run = slice(begin, end)
        return self.payload[run] + self.num_tokens[run] * offset + self.token[run] * row_bytes


def read_slots(job: CopyJob, num_slots: int, *, copied: bool = True) -> Int64:
    """The job's device slots as an array, of its own unless ``copied`` is False.

    Raises:
        TransferError: wrong type or number, or out of ``[0, num_slots)``.
    """
    given = job.device_slots
    slots: Int64
    if isinstance(given, torch.Tensor):
        check_tensor(job)
        slots = given.detach().cpu().numpy()
    elif isinstance(given, array) and given.typecode == "q":
        slots = np.frombuffer(given, dtype=np.int64) if given else np.empty(0, dtype=np.int64)
    else:
        raise _refused(job, f"device slots must be array('q') or an int64 tensor, not {type(given).__name__}")
    if copied:
        slots = np.array(slots, dtype=np.int64)
    if len(slots) != job.num_tokens:
        raise _refused(job, f"{job.num_tokens} tokens in the spans, {len(slots)} device slots")
    if len(slots) and np.maximum.reduce(slots.view(np.uint64)) >= num_slots:  # a negative one is a huge one
        raise _refused(job, f"device slots {slots.min()}..{slots.max()}, the pool has 0..{num_slots - 1}")
    return slots


def check_tensor(job: CopyJob) -> None:
    """What can be said of device slots in a tensor without reading it.

    Raises:
        TransferError: wrong type, shape or number.
    """
    given = job.device_slots
    if given.dtype != torch.int64 or given.dim() != 1:
        raise _refused(job, f"device slots must be a 1-D int64 tensor, not {given.dim()}-D {given.dtype}")
    if len(given) != job.num_tokens:
        raise _refused(job, f"{job.num_tokens} tokens in the spans, {len(given)} device slots")


def read_spans(job: CopyJob, layout: BlockLayout) -> SpanTable:
    """The job's spans as arrays.

    Raises:
        TransferError: a span that its block or its slot cannot hold.
    """
    table = _columns(job.spans) if isinstance(job.spans, HostSpans) else _facts(job.spans)
    address, num_tokens, first, last, room = table
    slack = np.empty((5, len(address)), dtype=np.int64)
    np.subtract(num_tokens, 1, out=slack[0])
    np.subtract(layout.block_tokens, num_tokens, out=slack[1])
    slack[2] = first
    np.subtract(last, first, out=slack[3])
    np.subtract(num_tokens, last, out=slack[4])
    if slack.size and slack.min() < 0:
        span = job.spans[int(np.flatnonzero((slack < 0).any(axis=0))[0])]
        raise _refused(
            job,
            f"tokens {span.first}..{span.last} of a block of {span.num_tokens}, "
            f"where a block has at most {layout.block_tokens}",
        )
    if (room.min(initial=layout.slot_bytes) < layout.slot_bytes) and (
        room < layout.header_bytes + num_tokens * layout.token_bytes
    ).any():
        raise _refused(job, f"a host slot of {room.min()} B is too small for a block of this layout")
    return SpanTable(address + layout.header_bytes, num_tokens, first, last)


def token_rows(
    spans: SpanTable, device_slots: Int64, chosen: Int64 | None = None, base: int = 0
) -> TokenRows:
    """Spell spans out token by token.

    Args:
        spans: All spans of the job.
        device_slots: All device slots of the job.
        chosen: Numbers of the spans that are wanted, ascending; None for all.
        base: Subtracted from addresses.
    """
    length = spans.last - spans.first
    start = np.cumsum(length) - length
    if chosen is None:
        chosen = np.arange(len(spans))
    length, start = length[chosen], start[chosen]
    total = int(length.sum())
    inside = np.arange(total) - np.repeat(np.cumsum(length) - length, length)
    return TokenRows(
        device_slots[np.repeat(start, length) + inside],
        np.repeat(spans.payload[chosen] - base, length),
        np.repeat(spans.num_tokens[chosen], length),
        np.repeat(spans.first[chosen], length) + inside,
    )


def _columns(spans: HostSpans) -> tuple[Int64, ...]:
    """Address, tokens, first, last and room of each span, without a loop over them."""
    pool = spans.pool
    joined = b"".join((spans.slots, spans.num_tokens, spans.first, spans.last))
    columns = np.frombuffer(joined, dtype=np.int64) if joined else np.empty(0, dtype=np.int64)
    slots, num_tokens, first, last = columns.reshape(4, -1)
    address = slots * pool.slot_bytes + pool.region.address
    return address, num_tokens, first, last, np.array([pool.slot_bytes], dtype=np.int64)


def _facts(spans: Sequence[BlockSpan]) -> tuple[Int64, ...]:
    """The same of single spans."""
    facts = [(s.slot.address, s.num_tokens, s.first, s.last, s.slot.view.nbytes) for s in spans]
    return tuple(np.fromiter(chain.from_iterable(facts), np.int64, 5 * len(facts)).reshape(-1, 5).T)


def _refused(job: CopyJob, why: str) -> TransferError:
    return TransferError(f"copy {job.number} refused: {why}", job=job.number)
