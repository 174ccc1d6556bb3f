"""Tier kit: bytes that change behind the tier's back never become a wrong block."""

from __future__ import annotations

import random

import pytest

from flexkv_core.keys import BlockKey
from flexkv_core.tier import Tier

from .tier_kit import Opener, TierKit, assert_holds, assert_never_wrong, load, store
from .values import Value, make_value, small_layout

DAMAGES = (
    "flip_front",
    "flip_anywhere",
    "flip_back",
    "half",
    "one_byte_short",
    "one_page_short",
    "empty",
    "longer",
    "zeros",
    "swapped",
    "foreign_layout",
    "deleted",
)


def damaged(how: str, raw: bytes, other: bytes, chance: random.Random) -> bytes | None:
    """What ``raw`` becomes; ``other`` is another key's raw bytes."""
    if how.startswith("flip"):
        at = {"flip_front": 0, "flip_back": len(raw) - 1}.get(how, chance.randrange(len(raw)))
        return raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]
    return {
        "half": raw[: len(raw) // 2],
        "one_byte_short": raw[:-1],
        "one_page_short": raw[:-4096],
        "empty": b"",
        "longer": raw + bytes(4096),
        "zeros": bytes(len(raw)),
        "swapped": other,
        "foreign_layout": _foreign(raw),
        "deleted": None,
    }[how]


def _foreign(raw: bytes) -> bytes:
    value = make_value(small_layout(num_layers=3), range(5))
    return (bytes(value.view) + bytes(len(raw)))[: len(raw)]


class CorruptionTests(TierKit):
    """Needs ``read_medium`` and ``write_medium``."""

    @pytest.mark.parametrize("how", DAMAGES)
    def test_damage_under_an_open_tier(self, opener: Opener, how: str) -> None:
        tier = opener.open()
        values = self._stored(tier)
        self._damage(opener, values, how)
        self._check(tier, values)

    @pytest.mark.parametrize("how", DAMAGES)
    def test_damage_before_a_restart(self, opener: Opener, how: str) -> None:
        tier = opener.open()
        self.require(tier, "persistent")
        values = self._stored(tier)
        tier.close()
        self._damage(opener, values, how)
        tier = opener.open()
        if tier.capabilities.can_list:
            listed = [row.key for batch in tier.list_blocks() for row in batch]
            assert values[1].key in listed, "one damaged value hides another"
        self._check(tier, values)

    def _stored(self, tier: Tier) -> list[Value]:
        values = self.values(tier, 3)
        store(tier, values)
        return values

    def _damage(self, opener: Opener, values: list[Value], how: str) -> None:
        try:
            raw = self._raw(opener, values[0].key)
            other = self._raw(opener, values[2].key)
            self.write_medium(opener.medium, values[0].key, damaged(how, raw, other, self.random()))
            if how == "swapped":
                self.write_medium(opener.medium, values[2].key, raw)
        except NotImplementedError:
            self.skip("read_medium and write_medium are not given")

    def _raw(self, opener: Opener, key: BlockKey) -> bytes:
        raw = self.read_medium(opener.medium, key)
        assert raw, "the medium holds nothing for a key that was stored"
        return raw

    def _check(self, tier: Tier, values: list[Value]) -> None:
        keys = [value.key for value in values]
        for value, (outcome, view) in zip(values, load(tier, keys, self.layout.slot_bytes), strict=True):
            assert_never_wrong(value, outcome, view)
        assert_holds(tier, [values[1]])
        tier.evict(keys)
        store(tier, values)
        assert_holds(tier, values)
