"""The part of the tier kit that an author fills in, and what its tests are written with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexkv_core.keys import BlockKey
from flexkv_core.layout import BlockLayout, round_up
from flexkv_core.tier import BufferState, Outcome, Status, Tier, TierContext

from .kit import Kit
from .values import Value, aligned_buffer, context_for, make_values, small_layout

UNTOUCHED = 0xA5
"""Fills buffers before a load, so that it shows whether they were written."""


class TierKit(Kit):
    """What an author gives.  Only ``open_tier`` is needed; the rest makes the kit stricter.

    Attributes:
        layout: Layout of the values that are stored.
        capacity_values: ``open_tier`` should make a bounded tier hold about as many values of
            ``context.value_bytes``, so that filling it is quick.
        kills: How many writing processes are killed, if the tier is persistent.
        seed: Of all that is random here; printed where a test fails.
    """

    layout: BlockLayout = small_layout()
    capacity_values: int = 64
    kills: int = 5
    seed: int = 20240817

    # -- for the author

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Any:
        """Where the values live, fresh for each test: a directory, or override it with a URL.

        A writer that is killed gets it in another process: only text, paths, numbers, lists and
        dictionaries of them can be sent there.
        """
        return tmp_path

    def open_tier(self, context: TierContext, medium: Any) -> Tier:
        """Open the tier under test over ``medium``; opening it again is a restart.

        Called in a killed writer's process too, on a bare instance of the class.
        """
        raise NotImplementedError("the kit's user gives open_tier(context, medium)")

    def read_medium(self, medium: Any, key: BlockKey) -> bytes | None:
        """The raw bytes that the medium holds for ``key``, read behind the tier's back."""
        raise NotImplementedError

    def write_medium(self, medium: Any, key: BlockKey, data: bytes | None) -> None:
        """Put raw bytes in place of them, behind the tier's back; None removes them."""
        raise NotImplementedError

    def break_medium(self, medium: Any) -> Any:
        """A context manager in which the medium cannot be reached (server down, directory gone)."""
        raise NotImplementedError

    def disturb_medium(self, medium: Any, how: str) -> Any:
        """A context manager in which the medium is there, and no good.

        Args:
            medium: What the fixture of that name gave.
            how: ``hung``: it takes what is sent and says nothing; ``slow``: bytes come one by one;
                ``cut``: connections end in the middle of a value.  Raise NotImplementedError for what the
                medium cannot be made to do.
        """
        raise NotImplementedError

    # -- for the tests

    @pytest.fixture
    def context(self) -> TierContext:
        """What the tier is told when it is opened."""
        return context_for(self.layout, "kit")

    @pytest.fixture
    def opener(self, context: TierContext, medium: Any) -> Iterator[Opener]:
        """Opens tiers over the test's medium, and closes all of them at the end."""
        opener = Opener(self, context, medium)
        yield opener
        opener.close()

    @pytest.fixture
    def tier(self, opener: Opener) -> Tier:
        """One open tier."""
        return opener.open()

    def require(self, tier: Tier, capability: str) -> None:
        """Skip unless the tier says that it has this capability."""
        if not getattr(tier.capabilities, capability):
            self.skip(f"the tier's capabilities lack {capability}")

    def values(self, tier: Tier, count: int, seed: int = 0, *, first: int = 0) -> list[Value]:
        """Valid values of all fills, padded as the tier wants them; see ``make_values``."""
        alignment = tier.capabilities.alignment_bytes
        return make_values(self.layout, count, seed, first=first, alignment_bytes=alignment)

    def buffer(self) -> memoryview:
        """A buffer for one load."""
        return aligned_buffer(self.layout.slot_bytes, UNTOUCHED)

    def random(self) -> random.Random:
        """Seeded chance."""
        return random.Random(self.seed)


class Opener:
    """Opens tiers over one medium, and forgets none."""

    def __init__(self, kit: TierKit, context: TierContext, medium: Any) -> None:
        self.kit = kit
        self.context = context
        self.medium = medium
        self._tiers: list[Tier] = []

    def open(self, context: TierContext | None = None) -> Tier:
        """Open one more tier over the medium."""
        tier = self.kit.open_tier(context or self.context, self.medium)
        assert isinstance(tier, Tier), f"open_tier returned {type(tier).__name__}, not a Tier"
        self._tiers.append(tier)
        return tier

    def close(self) -> None:
        """Close all, newest first."""
        while self._tiers:
            self._tiers.pop().close()


def store(tier: Tier, values: Sequence[Value], *, check: bool = True) -> list[Outcome]:
    """Store in batches that the tier takes; assert (``check``) that all were."""
    step = tier.capabilities.max_batch
    outcomes: list[Outcome] = []
    for at in range(0, len(values), step):
        batch = values[at : at + step]
        outcomes += well_formed(
            tier.store([v.key for v in batch], [v.view.toreadonly() for v in batch]), len(batch)
        )
    if check:
        assert [o for o in outcomes if not o.is_ok] == []
    return outcomes


def load(tier: Tier, keys: Sequence[BlockKey], size: int) -> list[tuple[Outcome, memoryview]]:
    """Load in batches that the tier takes; per key its outcome and the bytes that it speaks of."""
    results = []
    step = tier.capabilities.max_batch
    for at in range(0, len(keys), step):
        batch = keys[at : at + step]
        views = [aligned_buffer(size, UNTOUCHED) for _ in batch]
        outcomes = well_formed(tier.load(batch, views), len(batch))
        for outcome, view in zip(outcomes, views, strict=True):
            assert outcome.num_bytes <= size, f"{outcome} for a buffer of {size} B"
            is_told = not outcome.is_ok or outcome.buffer is BufferState.COMPLETE
            assert is_told, f"{outcome}: the core believes a load only that is told by loaded(num_bytes)"
            results.append((outcome, view[: outcome.num_bytes] if outcome.is_ok else view))
    return results


def load_one(tier: Tier, value: Value) -> tuple[Outcome, memoryview]:
    """Load one value's key."""
    return load(tier, [value.key], value.layout.slot_bytes)[0]


def assert_holds(tier: Tier, values: Sequence[Value]) -> None:
    """Every one of ``values`` loads, complete and equal, under its own key."""
    if not values:
        return
    got = load(tier, [value.key for value in values], values[0].layout.slot_bytes)
    for number, (value, (outcome, view)) in enumerate(zip(values, got, strict=True)):
        assert outcome.is_ok, f"value {number} of {len(values)}: {outcome}"
        assert outcome.num_bytes == len(value.view), f"value {number}: stored {len(value.view)} B, {outcome}"
        assert value.accepts(view), f"value {number} came back damaged"
        assert value.equals(view), f"value {number} came back with another payload"


def assert_never_wrong(value: Value, outcome: Outcome, view: memoryview, *others: Value) -> bool:
    """A miss, a failure, bytes that the core rejects, or the value (one of ``others``); never anything else.

    Returns:
        Whether the core would serve it.
    """
    if not outcome.is_ok or value.accepts(view) is None:
        return False
    assert any(one.means(view) for one in (value, *others)), f"a wrong block was served: {outcome}"
    return True


def well_formed(outcomes: object, count: int) -> list[Outcome]:
    """Assert that a batch's answer is a list of ``count`` outcomes, each of which makes sense."""
    assert isinstance(outcomes, list), f"a batch returns a list, got {type(outcomes).__name__}"
    assert len(outcomes) == count, f"{len(outcomes)} outcomes for {count} keys"
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), f"not an Outcome: {outcome!r}"
        assert outcome.num_bytes >= 0
        assert outcome.reason or outcome.status in (Status.OK, Status.MISS), (
            f"failed without a reason: {outcome}"
        )
    return outcomes


def opaque(key_number: int, num_bytes: int) -> tuple[BlockKey, memoryview]:
    """A key and bytes that are no valid value: a tier does not look inside."""
    chance = random.Random(key_number)
    view = aligned_buffer(num_bytes)
    view[:] = chance.randbytes(num_bytes)
    return chance.randbytes(32), view


def edge_sizes(context: TierContext, alignment: int) -> list[int]:
    """Lengths at which something may break: smallest, round a page, largest."""
    top = context.value_bytes // alignment * alignment
    wanted = (1, 4095, 4096, 4097, context.value_bytes // 2, top - alignment, top)
    return sorted({min(top, max(alignment, round_up(size, alignment))) for size in wanted})
