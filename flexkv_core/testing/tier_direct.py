"""Tier kit: tiers whose memory the device copies to and from."""

from __future__ import annotations

import ctypes

import pytest

from flexkv_core.errors import FlexKVError, TierClosedError
from flexkv_core.tier import DirectTier, Status, Tier

from .kit import Crew
from .tier_kit import Opener, TierKit, assert_holds, load_one, store, well_formed
from .values import Value

_ALL = 1 << 20
"""More slots than any tier of the kit has."""


class DirectTests(TierKit):
    """Reserve, publish, release, borrow, withdraw: free and taken slots always make the capacity."""

    def _direct(self, tier: Tier) -> DirectTier:
        self.require(tier, "direct_slots")
        assert isinstance(tier, DirectTier)
        return tier

    def _num_free(self, tier: DirectTier) -> int:
        slots = tier.reserve(_ALL)
        tier.release(slots)
        return len(slots)

    def _publish(self, tier: DirectTier, value: Value) -> int:
        (slot,) = tier.reserve(1)
        tier.slots.view(slot)[: len(value.view)] = value.view
        tier.publish([value.key], [slot], [len(value.view)])
        return slot

    def test_slots_are_distinct_places_in_the_region(self, tier: Tier) -> None:
        direct = self._direct(tier)
        numbers = direct.reserve(_ALL)
        assert len(numbers) == len(set(numbers)) >= 2
        assert direct.reserve(1) == []
        assert direct.reserve(0) == []
        region = direct.slots.region
        slots = [direct.slots.slot(number) for number in numbers]
        spans = sorted((slot.address, slot.address + len(slot.view)) for slot in slots)
        assert spans[0][0] >= region.address
        assert spans[-1][1] <= region.address + region.num_bytes
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
        for slot in slots:
            assert len(slot.view) >= self.layout.slot_bytes
            assert ctypes.addressof(ctypes.c_char.from_buffer(slot.view)) == slot.address
        direct.release(numbers)
        assert self._num_free(direct) == len(slots)

    def test_published_slot_is_the_value(self, tier: Tier) -> None:
        direct = self._direct(tier)
        free = self._num_free(direct)
        (value,) = self.values(tier, 1)
        assert direct.borrow([value.key]) == [-1]
        (slot,) = direct.reserve(1)
        direct.slots.view(slot)[: len(value.view)] = value.view
        assert well_formed(direct.lookup([value.key]), 1)[0].status is Status.MISS
        direct.publish([value.key], [slot], [len(value.view)])
        assert_holds(direct, [value])
        assert direct.borrow([value.key]) == [slot]
        assert self._num_free(direct) == free - 1
        assert well_formed(direct.evict([value.key]), 1)[0].is_ok
        assert direct.borrow([value.key]) == [-1]
        assert self._num_free(direct) == free

    def test_publishing_again_frees_the_older_slot(self, tier: Tier) -> None:
        direct = self._direct(tier)
        free = self._num_free(direct)
        (old,), (new,) = self.values(tier, 1), self.values(tier, 1, seed=1)
        self._publish(direct, old)
        self._publish(direct, new)
        assert_holds(direct, [new])
        assert self._num_free(direct) == free - 1

    def test_stored_values_can_be_borrowed(self, tier: Tier) -> None:
        direct = self._direct(tier)
        (value,) = self.values(tier, 1)
        store(direct, [value])
        (slot,) = direct.borrow([value.key])
        assert value.equals(direct.slots.view(slot))

    def test_withdrawn_slot_stays_readable_and_taken(self, tier: Tier) -> None:
        direct = self._direct(tier)
        free = self._num_free(direct)
        (value,) = self.values(tier, 1)
        self._publish(direct, value)
        (slot,) = direct.withdraw([value.key])
        assert direct.withdraw([value.key]) == [-1]
        outcome, _ = load_one(direct, value)
        assert outcome.status is Status.MISS
        assert self._num_free(direct) == free - 1
        assert value.equals(direct.slots.view(slot))
        direct.publish([value.key], [slot], [len(value.view)])
        assert_holds(direct, [value])
        direct.evict([value.key])
        assert self._num_free(direct) == free

    def test_slot_given_back_twice_is_refused(self, tier: Tier) -> None:
        direct = self._direct(tier)
        free = self._num_free(direct)
        slots = direct.reserve(1)
        direct.release(slots)
        with pytest.raises((ValueError, FlexKVError)):
            direct.release(slots)
        assert self._num_free(direct) == free

    def test_no_slot_is_lost_between_threads(self, tier: Tier) -> None:
        direct = self._direct(tier)
        free = self._num_free(direct)
        values = self.values(tier, 4)
        crew = Crew(self.deadline_s)

        def work(number: int) -> None:
            for turn in range(50):
                value = values[(number + turn) % 4]
                slots = direct.reserve(2)
                direct.release(slots[1:])
                if slots:
                    direct.slots.view(slots[0])[: len(value.view)] = value.view
                    direct.publish([value.key], slots[:1], [len(value.view)])
                if turn % 3 == 0:
                    direct.evict([value.key])
                outcome, view = load_one(direct, value)
                assert not outcome.is_ok or value.equals(view)

        crew.start(4, work)
        crew.join()
        direct.evict([value.key for value in values])
        assert self._num_free(direct) == free

    def test_closed_direct_tier(self, opener: Opener) -> None:
        direct = self._direct(opener.open())
        (value,) = self.values(direct, 1)
        self._publish(direct, value)
        direct.close()
        with pytest.raises(TierClosedError):
            direct.reserve(1)
        assert not direct.slots.region.is_open, "nobody holds a view, and the memory is still mapped"
