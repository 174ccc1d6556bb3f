"""Tier kit: values that outlive a tier object, a process, or are seen by two at once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from flexkv_core.envelope import parse
from flexkv_core.errors import FlexKVError
from flexkv_core.tier import Status, StoredBlock, Tier

from .crash import NUM_KEYS, Writer
from .kit import spin
from .tier_kit import Opener, TierKit, assert_holds, assert_never_wrong, load_one, store, well_formed


class PersistenceTests(TierKit):
    """Listing, restart, kill -9, two tiers on one medium."""

    def test_list_is_complete_with_heads(self, opener: Opener) -> None:
        tier = opener.open()
        self.require(tier, "can_list")
        values = self.values(tier, 9)
        store(tier, values)
        tier.evict([values[0].key])
        if tier.capabilities.persistent:
            tier.close()
            tier = opener.open()
        listed = _listed(tier)
        assert set(listed) == {value.key for value in values[1:]}
        for value in values[1:]:
            block = listed[value.key]
            assert block.num_bytes == len(value.view)
            head = bytes(value.view[: opener.context.head_bytes])
            assert block.head == head, "the head is the value's first head_bytes bytes"
            assert parse(block.head, self.layout).key == value.key

    def test_values_outlive_a_restart(self, opener: Opener) -> None:
        tier = opener.open()
        self.require(tier, "persistent")
        values = self.values(tier, 8)
        store(tier, values)
        store(tier, self.values(tier, 2, seed=3))
        tier.evict([values[7].key])
        before = tier.usage()
        tier.close()
        tier = opener.open()
        for value in values[2:7]:
            assert well_formed(tier.lookup([value.key]), 1)[0].is_ok
        assert_holds(tier, values[2:7])
        assert well_formed(tier.lookup([values[7].key]), 1)[0].status is Status.MISS
        assert tier.usage().num_blocks in (-1, before.num_blocks), "accounting differs after the restart"

    def test_foreign_layout_is_never_served(self, opener: Opener) -> None:
        tier = opener.open()
        self.require(tier, "persistent")
        values = self.values(tier, 3)
        store(tier, values)
        tier.close()
        foreign = replace(opener.context, fingerprint=b"another layout..", identity='{"model": "other"}')
        try:
            tier = opener.open(foreign)
        except FlexKVError:
            return  # refusing the medium is as good as missing
        for value in values:
            outcome, view = load_one(tier, value)
            assert_never_wrong(value, outcome, view)
        tier.close()
        assert_holds(opener.open(), values)

    def test_kill_9_in_mid_write(self, opener: Opener) -> None:
        tier = opener.open()
        self.require(tier, "persistent")
        tier.close()
        chance = self.random()
        for kill in range(self.kills):
            with Writer(self, opener.medium, self.deadline_s) as writer:
                told = writer.wait_for_stores(chance.randrange(1, 4 * NUM_KEYS))
                spin(chance.random() * 2e-3)
                told += writer.kill()
            tier = opener.open()
            self._check_after_kill(tier, dict(told), f"seed {self.seed}, kill {kill}")
            for key in [value.key for value in self.values(tier, NUM_KEYS)]:
                tier.evict([key])
            tier.close()

    def _check_after_kill(self, tier: Tier, acknowledged: dict[int, int], where: str) -> None:
        """Acknowledged values are there, in this edition or the one under way; others whole or not at all."""
        last = max(acknowledged.values())
        editions = {n: self.values(tier, NUM_KEYS, seed=n) for n in (last - 1, last, last + 1)}
        for number, value in enumerate(editions[last]):
            outcome, view = load_one(tier, value)
            is_served = assert_never_wrong(value, outcome, view, *(one[number] for one in editions.values()))
            may_vanish = number not in acknowledged or tier.capabilities.expires
            assert is_served or may_vanish, f"{where}: an acknowledged value is gone: {outcome}"
        assert tier.usage().num_blocks <= NUM_KEYS, f"{where}: {tier.usage()}"
        store(tier, editions[last])
        assert_holds(tier, editions[last])

    def test_second_tier_on_the_same_medium(self, opener: Opener) -> None:
        first = opener.open()
        self._require_medium(first)
        try:
            second = opener.open()
        except FlexKVError:
            if first.capabilities.shared:
                raise
            return  # refused: two instances are never mixed
        mine, yours = self.values(first, 4), self.values(second, 4, first=4)
        store(first, mine)
        store(second, yours)
        for tier, values in ((first, yours), (second, mine)):
            for value in values:
                outcome, view = load_one(tier, value)
                assert assert_never_wrong(value, outcome, view) or not first.capabilities.shared
        if first.capabilities.shared:
            keys = [value.key for value in mine]
            assert all(o.is_ok for o in well_formed(second.evict(keys), 4))
            # What a tier knows of a store may be a little old, but not for ever.
            until = time.monotonic() + self.deadline_s
            while any(o.status is not Status.MISS for o in first.lookup(keys)):
                assert time.monotonic() < until, "what another tier removed is promised for ever"
                time.sleep(0.01)

    def test_reader_beside_a_writing_process(self, opener: Opener) -> None:
        tier = opener.open()
        self.require(tier, "shared")
        self.require(tier, "persistent")
        with Writer(self, opener.medium, self.deadline_s) as writer:
            for _ in range(3 * NUM_KEYS):
                ((number, edition),) = writer.wait_for_stores(1)
                value = self.values(tier, NUM_KEYS, seed=edition)[number]
                outcome, view = load_one(tier, value)
                assert outcome.is_ok
                assert value.accepts(view), "a value was seen half written"

    def _require_medium(self, tier: Tier) -> None:
        if not (tier.capabilities.persistent or tier.capabilities.shared):
            self.skip("the tier is neither persistent nor shared")


def _listed(tier: Tier) -> dict[bytes, StoredBlock]:
    rows: list[Any] = [row for batch in tier.list_blocks() for row in batch]
    assert all(isinstance(row, StoredBlock) for row in rows)
    listed = {row.key: row for row in rows}
    assert len(listed) == len(rows), "a key was listed twice"
    return listed
