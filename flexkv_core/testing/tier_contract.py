"""Tier kit: what every tier does, one call at a time."""

from __future__ import annotations

import pytest

from flexkv_core.errors import TierClosedError, UnsupportedOperationError
from flexkv_core.tier import DirectTier, Status, Tier, TierCapabilities, TierContext

from .leaks import Snapshot
from .tier_kit import (
    UNTOUCHED,
    Opener,
    TierKit,
    assert_holds,
    assert_never_wrong,
    edge_sizes,
    load,
    load_one,
    opaque,
    store,
    well_formed,
)
from .values import aligned_buffer


class ContractTests(TierKit):
    """Round trips, batches, overwriting, removal, closing."""

    def test_capabilities_make_sense(self, tier: Tier, context: TierContext) -> None:
        has = tier.capabilities
        assert isinstance(has, TierCapabilities)
        assert has.max_batch >= 1
        assert has.max_concurrency >= 1
        assert has.alignment_bytes >= 1
        assert context.value_bytes % has.alignment_bytes == 0, "a slot must be a multiple of the alignment"
        assert has.max_value_bytes == 0 or has.max_value_bytes >= context.value_bytes
        assert has.direct_slots == isinstance(tier, DirectTier)
        tier.check_health()

    def test_empty_tier_misses_and_leaves_buffers_alone(self, tier: Tier) -> None:
        keys = [opaque(number, 8)[0] for number in range(3)]
        assert [o.status for o in well_formed(tier.lookup(keys), 3)] == [Status.MISS] * 3
        for outcome, view in load(tier, keys, self.layout.slot_bytes):
            assert outcome.status is Status.MISS
            assert set(bytes(view)) == {UNTOUCHED}, "a miss wrote into the buffer"
        assert [o.status for o in well_formed(tier.evict(keys), 3)] == [Status.MISS] * 3

    def test_round_trip_at_edge_sizes(self, tier: Tier, context: TierContext) -> None:
        for number, size in enumerate(edge_sizes(context, tier.capabilities.alignment_bytes)):
            key, view = opaque(number, size)
            (stored,) = well_formed(tier.store([key], [view.toreadonly()]), 1)
            assert stored.is_ok, f"{size} B: {stored}"
            (found,) = well_formed(tier.lookup([key]), 1)
            assert found.is_ok
            assert found.num_bytes in (0, size)
            ((outcome, got),) = load(tier, [key], context.value_bytes)
            assert outcome.is_ok, f"{size} B: {outcome}"
            assert outcome.num_bytes == size
            assert got == view, f"{size} B came back different"

    def test_blocks_of_every_fill_verify(self, tier: Tier) -> None:
        values = self.values(tier, self.layout.block_tokens)
        store(tier, values)
        assert_holds(tier, values)

    def test_outcomes_stand_in_the_order_of_the_keys(self, tier: Tier) -> None:
        values = self.values(tier, 16)
        present = values[::2]
        store(tier, present)
        mixed = self.random().sample(values, len(values))
        wanted = [value in present for value in mixed]
        keys = [value.key for value in mixed][: tier.capabilities.max_batch]
        assert [o.is_ok for o in well_formed(tier.lookup(keys), len(keys))] == wanted[: len(keys)]
        got = load(tier, [value.key for value in mixed], self.layout.slot_bytes)
        for value, is_there, (outcome, view) in zip(mixed, wanted, got, strict=True):
            assert outcome.status is (Status.OK if is_there else Status.MISS)
            assert not is_there or value.equals(view)

    def test_largest_batch(self, tier: Tier) -> None:
        count = min(tier.capabilities.max_batch, self.capacity_values // 2)
        values = self.values(tier, count)
        outcomes = tier.store([v.key for v in values], [v.view.toreadonly() for v in values])
        assert all(o.is_ok for o in well_formed(outcomes, count))
        assert_holds(tier, values)
        assert all(o.is_ok for o in well_formed(tier.evict([v.key for v in values]), count))

    def test_empty_batch(self, tier: Tier) -> None:
        assert tier.lookup([]) == []
        assert tier.load([], []) == []
        assert tier.store([], []) == []
        assert tier.evict([]) == []

    def test_keys_are_opaque(self, tier: Tier) -> None:
        keys = [bytes([byte]) * 32 for byte in (0x01, 0x0A, 0x2F, 0x7F, 0xFF)]
        keys += [bytes(31) + b"\x01", b"\x01" + bytes(31), b"../" * 10 + b"ab", b"*?[]" * 8]
        size = max(tier.capabilities.alignment_bytes, 64)
        views = [opaque(number, size)[1] for number in range(len(keys))]
        for key, view in zip(keys, views, strict=True):
            assert well_formed(tier.store([key], [view]), 1)[0].is_ok
        for (outcome, got), view in zip(load(tier, keys, self.layout.slot_bytes), views, strict=True):
            assert outcome.is_ok
            assert got == view

    def test_storing_again_replaces_the_value_or_leaves_the_old(self, tier: Tier) -> None:
        old, new = self.values(tier, 4), self.values(tier, 4, seed=1)
        store(tier, old)
        store(tier, new)
        for before, after in zip(old, new, strict=True):
            outcome, view = load_one(tier, after)
            assert outcome.is_ok
            assert assert_never_wrong(after, outcome, view, before)
        usage = tier.usage()
        assert usage.num_blocks in (-1, 4), f"a value stored twice counts once: {usage}"

    def test_storing_another_length_under_a_key(self, tier: Tier) -> None:
        step = tier.capabilities.alignment_bytes
        key, view = opaque(1, max(step, 8192))
        for size in (len(view), step, len(view)):
            assert well_formed(tier.store([key], [view[:size]]), 1)[0].is_ok
            ((outcome, got),) = load(tier, [key], self.layout.slot_bytes)
            assert outcome.is_ok
            assert got in (view, view[:step]), "neither the old value nor the new one"

    def test_evicted_values_are_misses(self, tier: Tier) -> None:
        values = self.values(tier, 6)
        store(tier, values)
        gone, kept = values[:3], values[3:]
        keys = [value.key for value in (*gone, *kept[:0])]
        assert [o.status for o in well_formed(tier.evict(keys), 3)] == [Status.OK] * 3
        assert [o.status for o in well_formed(tier.evict(keys), 3)] == [Status.MISS] * 3
        assert [o.status for o in well_formed(tier.lookup(keys), 3)] == [Status.MISS] * 3
        assert [o.status for o, _ in load(tier, keys, self.layout.slot_bytes)] == [Status.MISS] * 3
        assert_holds(tier, kept)
        store(tier, gone)
        assert_holds(tier, values)

    def test_callers_memory_is_its_own_after_the_call(self, tier: Tier) -> None:
        (value,) = self.values(tier, 1)
        source = aligned_buffer(len(value.view))
        source[:] = value.view
        assert well_formed(tier.store([value.key], [source]), 1)[0].is_ok
        assert source == value.view, "the tier wrote into a value that it was to keep"
        source[:] = bytes(len(source))
        assert_holds(tier, [value])
        _, first = load_one(tier, value)
        first[:] = bytes(len(first))
        assert_holds(tier, [value])

    def test_buffer_that_is_too_short(self, tier: Tier) -> None:
        step = tier.capabilities.alignment_bytes
        values = self.values(tier, 2)
        store(tier, values)
        short = aligned_buffer((len(values[0].view) - 1) // step * step, UNTOUCHED)
        if len(short) == 0:
            self.skip("the values are as short as the alignment")
        keys, views = [v.key for v in values], [short, self.buffer()]
        first, second = tier.load(keys[:2], views)
        assert first.status in (Status.CORRUPT, Status.INVALID), f"does not fit, yet: {first}"
        assert second.is_ok, "one key's failure is no other's"
        assert values[1].equals(views[1])

    def test_listing_is_honest(self, tier: Tier) -> None:
        if tier.capabilities.can_list:
            assert [row for batch in tier.list_blocks() for row in batch] == []
        else:
            with pytest.raises(UnsupportedOperationError):
                list(tier.list_blocks())

    def test_close_twice_and_use_after_close(self, tier: Tier) -> None:
        (value,) = self.values(tier, 1)
        store(tier, [value])
        tier.close()
        tier.close()
        for call in (
            lambda: tier.lookup([value.key]),
            lambda: tier.load([value.key], [self.buffer()]),
            lambda: tier.store([value.key], [value.view]),
            lambda: tier.evict([value.key]),
            tier.check_health,
        ):
            with pytest.raises(TierClosedError):
                call()

    def test_context_manager_closes(self, opener: Opener) -> None:
        with opener.open() as tier:
            tier.lookup([bytes(32)])
        with pytest.raises(TierClosedError):
            tier.lookup([bytes(32)])

    def test_leaves_no_thread_descriptor_or_process(self, opener: Opener) -> None:
        values = None
        before = Snapshot.take()
        for cycle in range(4):
            with opener.open() as tier:
                values = values or self.values(tier, 4)
                store(tier, values)
                assert_holds(tier, values)
            opener.close()
            if cycle == 0:  # what a library starts once for the process is not the tier's leak
                before = Snapshot.take()
        assert before.wait_until_back() == []
