"""Host slots: every one is free, published, lent or kept back; never two of these."""

from __future__ import annotations

import pytest

from flexkv_core.chain.host import HostSlots
from flexkv_core.testing import small_layout
from tests.support.chains import cpu_tier

LAYOUT = small_layout()
KEYS = [bytes([n]) * 32 for n in range(4)]


@pytest.fixture(params=["direct", "staging"])
def host(request):
    tier = cpu_tier(LAYOUT, 4) if request.param == "direct" else None
    slots = HostSlots(tier, 4 * LAYOUT.slot_bytes, LAYOUT.slot_bytes)
    yield slots
    slots.close()
    if tier is not None:
        tier.close()


def test_fewer_come_when_fewer_are_free(host):
    assert len(host.take(3)) == 3
    assert len(host.take(3)) == 1
    assert host.take(1) == []
    assert host.num_lent == 4


def test_the_last_user_frees_a_slot(host):
    (slot,) = host.take(1)
    host.use([slot])
    host.drop([slot])
    assert host.num_lent == 1
    host.drop([slot])
    assert host.num_lent == 0
    assert host.pool.num_free == 4
    with pytest.raises(ValueError):
        host.drop([slot])


def test_a_slot_in_quarantine_is_not_given_again(host):
    slots = host.take(4)
    host.quarantine(slots[0])
    for slot in slots[1:]:
        host.drop([slot])
    assert host.num_quarantined == 1
    assert slots[0] not in host.take(4)
    host.end_quarantine(slots[0])
    assert host.take(1) == [slots[0]]


def test_publishing_ends_the_loan():
    tier = cpu_tier(LAYOUT, 4)
    host = HostSlots(tier, 0, LAYOUT.slot_bytes)
    slots = host.take(2)
    host.publish(KEYS[:2], slots, [10, 10])
    assert host.num_lent == 0
    assert tier.borrow(KEYS[:3]) == [*slots, -1]
    (slot,) = tier.withdraw(KEYS[:1])
    host.adopt([slot])
    host.drop([slot])
    assert host.pool.num_free == 3
    tier.close()


def test_a_staging_slot_is_never_published():
    host = HostSlots(None, 0, LAYOUT.slot_bytes)
    assert host.pool.capacity == 1
    with pytest.raises(AssertionError):
        host.publish(KEYS[:1], host.take(1), [1])
    host.close()
