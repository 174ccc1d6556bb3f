"""Tier kit: what happens at the limits of room and length."""

from __future__ import annotations

from flexkv_core.keys import BlockKey
from flexkv_core.tier import Status, Tier

from .tier_kit import TierKit, opaque, store, well_formed
from .values import Value

_MOST = 4
"""A tier opened with room for more than this many times ``capacity_values`` is not filled: too slow."""


class LimitTests(TierKit):
    """``capacity_bytes`` and ``max_value_bytes``."""

    def _require_small(self, tier: Tier) -> None:
        self.require(tier, "capacity_bytes")
        most = _MOST * self.capacity_values * self.layout.slot_bytes
        if tier.capabilities.capacity_bytes > most:
            self.skip(
                f"open_tier gave {tier.capabilities.capacity_bytes:,} B of room; at most {most:,} is filled"
            )
        if tier.capabilities.expires:
            self.skip("the store evicts by itself")

    def _full(self, number: int, tier: Tier) -> Value:
        """A value of the largest length, with a key of its own."""
        size = self.layout.slot_bytes // tier.capabilities.alignment_bytes * tier.capabilities.alignment_bytes
        key, view = opaque(number, size)
        return Value(key, view, self.layout, size)

    def _fill(self, tier: Tier) -> list[Value]:
        kept: list[Value] = []
        for number in range(_MOST * self.capacity_values + 2):
            value = self._full(number, tier)
            (outcome,) = store(tier, [value], check=False)
            if not outcome.is_ok:
                assert outcome.status is Status.NO_SPACE, f"full, yet: {outcome}"
                return kept
            kept.append(value)
        raise AssertionError(f"{len(kept)} values of {self.layout.slot_bytes} B fit into {tier.capabilities}")

    def test_full_tier_says_so_and_eviction_makes_room(self, tier: Tier) -> None:
        self._require_small(tier)
        kept = self._fill(tier)
        assert kept, "not one value fits: open_tier should give room for capacity_values"
        usage = tier.usage()
        assert usage.used_bytes <= tier.capabilities.capacity_bytes
        assert usage.num_blocks in (-1, len(kept))
        self._assert_all(tier, kept)
        late = self._full(100_000, tier)
        assert well_formed(tier.lookup([late.key]), 1)[0].status is Status.MISS
        assert well_formed(tier.evict([kept[0].key]), 1)[0].is_ok
        store(tier, [late])
        self._assert_all(tier, [*kept[1:], late])

    def test_batch_that_fits_in_part(self, tier: Tier) -> None:
        self._require_small(tier)
        kept = self._fill(tier)
        if tier.capabilities.max_batch < 3 or len(kept) < 2:
            self.skip("too small for a batch of three")
        tier.evict([kept[0].key])
        more = [self._full(200_000 + number, tier) for number in range(3)]
        outcomes = store(tier, more, check=False)
        told: list[BlockKey] = [v.key for v, o in zip(more, outcomes, strict=True) if o.is_ok]
        assert len(told) == 1, f"one of three fits: {outcomes}"
        assert {o.status for o in outcomes} == {Status.OK, Status.NO_SPACE}
        found = well_formed(tier.lookup([v.key for v in more]), 3)
        assert [v.key for v, o in zip(more, found, strict=True) if o.is_ok] == told

    def test_room_comes_back_whole(self, tier: Tier) -> None:
        self._require_small(tier)
        first = self._fill(tier)
        for value in first:
            assert well_formed(tier.evict([value.key]), 1)[0].is_ok
        assert tier.usage().num_blocks in (-1, 0)
        assert len(self._fill(tier)) == len(first), "evicting everything did not give all room back"

    def test_overwriting_does_not_use_room_up(self, tier: Tier) -> None:
        self._require_small(tier)
        values = self.values(tier, 2)
        for seed in range(3 * self.capacity_values):
            store(tier, self.values(tier, 2, seed=seed % 2))
        assert [o.is_ok for o in well_formed(tier.lookup([v.key for v in values]), 2)] == [True, True]
        assert tier.usage().num_blocks in (-1, 2)

    def test_value_that_is_too_long(self, tier: Tier) -> None:
        self.require(tier, "max_value_bytes")
        step = tier.capabilities.alignment_bytes
        key, view = opaque(1, (tier.capabilities.max_value_bytes // step + 1) * step)
        (outcome,) = well_formed(tier.store([key], [view]), 1)
        assert outcome.status in (Status.INVALID, Status.NO_SPACE, Status.UNSUPPORTED)
        assert well_formed(tier.lookup([key]), 1)[0].status is Status.MISS

    def _assert_all(self, tier: Tier, values: list[Value]) -> None:
        for value in values:
            view = self.buffer()
            (outcome,) = tier.load([value.key], [view])
            assert outcome.is_ok
            assert view[: outcome.num_bytes] == value.view
