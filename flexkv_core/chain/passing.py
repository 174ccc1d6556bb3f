"""Passing: blocks that lie whole in host slots, on their way into the tiers below.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..index.stretch import Stretch
from ..keys import BlockKey


@dataclass(slots=True, eq=False)
class Passing:
    """Blocks that lie whole in host slots, on their way down.

    Attributes:
        blocks: The blocks.
        slots: Where each lies.
        is_pinned: Whether they are blocks of the first tier, so that a pin keeps them; otherwise their
            slots are lent, and get one more user.
    """

    blocks: Stretch
    slots: list[int]
    is_pinned: bool

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, first: int, last: int) -> Passing:
        """Some of them."""
        return Passing(self.blocks.part(first, last), self.slots[first:last], self.is_pinned)


def passing(stretches: Sequence[Stretch], slots: Sequence[int], *, is_pinned: bool) -> list[Passing]:
    """Blocks on their way down, with one slot each."""
    found, at = [], 0
    for stretch in stretches:
        found.append(Passing(stretch, list(slots[at : at + len(stretch)]), is_pinned))
        at += len(stretch)
    return found


def cut_into(parts: Sequence[Passing], pieces: Sequence[range]) -> list[list[Passing]]:
    """Blocks by the pieces that they belong to; ``pieces`` are positions of all of them, without gaps."""
    found: list[list[Passing]] = [[] for _ in pieces]
    first = number = 0
    for part in parts:
        at, last = first, first + len(part)
        while at < last and number < len(pieces):
            stop = min(last, pieces[number].stop)
            is_whole = at == first and stop == last
            found[number].append(part if is_whole else part.part(at - first, stop - first))
            at = stop
            number += at == pieces[number].stop
        first = last
    return found


def split_at(parts: Sequence[Passing], count: int) -> tuple[list[Passing], list[Passing]]:
    """The first ``count`` blocks, and the others."""
    total = num_blocks(parts)
    if count >= total:
        return list(parts), []
    if count <= 0:
        return [], list(parts)
    head, rest = cut_into(parts, [range(count), range(count, total)])
    return head, rest


def num_blocks(parts: Sequence[Passing]) -> int:
    """How many blocks that are."""
    return sum(map(len, parts))


def all_keys(parts: Sequence[Passing]) -> list[BlockKey]:
    """Their keys."""
    return [key for part in parts for key in part.blocks.keys]
