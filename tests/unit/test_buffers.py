"""Host memory: regions and slots."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core import HostRegion, SlotPool
from tests.support.waiting import DEADLINE_S


@pytest.fixture
def region():
    region = HostRegion(10 * 4096)
    yield region
    region.close()


class TestRegion:
    def test_is_whole_pages_zeroed_and_where_it_says(self, region):
        assert HostRegion(1).num_bytes == mmap.PAGESIZE
        assert HostRegion(0).num_bytes == mmap.PAGESIZE
        assert region.address % mmap.PAGESIZE == 0
        assert not any(region.view)
        ctypes.memset(region.address + 5, 0x7F, 1)
        assert region.view[5] == 0x7F

    def test_close_unmaps_and_may_be_called_twice(self):
        region = HostRegion(4096)
        told = []
        region.on_close.append(lambda: told.append(region.is_open))
        region.close()
        region.close()
        assert told == [True], "unpinning happens once, while the memory is mapped"
        assert not region.is_open

    def test_close_while_a_view_is_out_leaves_the_memory_to_its_holder(self):
        region = HostRegion(4096)
        view = region.view[:16]
        region.close()
        view[:3] = b"abc"
        assert bytes(view[:3]) == b"abc"
        assert region.is_open
        del view
        region.close()
        assert not region.is_open


class TestPool:
    def test_slots_do_not_overlap(self, region):
        pool = SlotPool(region, 4096)
        for number in pool.take(10):
            pool.view(number)[:] = bytes([number + 1]) * 4096
        for number in range(10):
            assert set(bytes(pool.view(number))) == {number + 1}
            slot = pool.slot(number)
            assert ctypes.string_at(slot.address, 2) == bytes([number + 1]) * 2

    def test_capacity_is_what_fits_or_what_is_asked_for(self, region):
        assert SlotPool(region, 3 * 4096).capacity == 3
        assert SlotPool(region, 4096, 4).capacity == 4
        assert SlotPool(region, 4096, 400).capacity == 10
        assert SlotPool(region, 11 * 4096).take(1) == []

    @given(st.lists(st.integers(-2, 7), max_size=30))
    def test_free_and_taken_make_the_capacity(self, steps):
        region = HostRegion(10 * 4096)
        pool = SlotPool(region, 4096)
        taken = []
        for step in steps:
            if step >= 0:
                got = pool.take(step)
                assert len(got) == min(step, 10 - len(taken))
                taken += got
            elif taken:
                pool.give([taken.pop(0)])
            assert pool.num_free + len(taken) == pool.capacity
            assert len(set(taken)) == len(taken)
        region.close()

    def test_giving_back_twice_is_an_error(self, region):
        pool = SlotPool(region, 4096)
        slots = pool.take(2)
        pool.give(slots)
        with pytest.raises(ValueError, match="given back twice"):
            pool.give(slots[:1])
        assert pool.num_free == pool.capacity

    @pytest.mark.parametrize("number", [-1, 10, 1 << 40])
    def test_numbers_of_no_slot_are_refused(self, region, number):
        """-1 says 'no slot' elsewhere: it must not free the last one."""
        pool = SlotPool(region, 4096)
        pool.take(10)
        with pytest.raises((ValueError, IndexError)):
            pool.give([number])
        assert pool.num_free == 0

    def test_threads_never_get_the_same_slot(self, region):
        pool = SlotPool(region, 4096)
        holders = [0] * 10
        wrong = []

        def work():
            for _ in range(300):
                for number in pool.take(3):
                    holders[number] += 1
                    if holders[number] != 1:
                        wrong.append(number)
                    holders[number] -= 1
                    pool.give([number])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not wrong
        assert pool.num_free == 10
