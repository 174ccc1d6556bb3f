"""The end of a call, as the chain's thread sees it."""

from __future__ import annotations

import threading
import time

from flexkv_core.chain.calls import Call, Completed, Completions, Message, Returned, Verb
from flexkv_core.chain.executor import TierWorkers
from flexkv_core.testing import (
    FakeClock,
    Fault,
    FaultKind,
    FaultTier,
    MemoryTier,
    context_for,
    make_values,
    small_layout,
)
from tests.support.waiting import DEADLINE_S


class _Watched(Completions):
    """Notes how many calls are open while a worker delivers a message."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: TierWorkers | None = None
        self.open: list[int] = []

    def put(self, message: Message) -> None:
        assert self.workers is not None
        self.open.append(self.workers.num_open)
        super().put(message)


def test_a_call_is_open_until_its_message_is_there() -> None:
    """Otherwise a drain that falls between the two says that nothing is under way, and pins are held."""
    layout = small_layout()
    completions = _Watched()
    tier = MemoryTier(context_for(layout))
    workers = TierWorkers(
        "t", tier, load_threads=1, store_threads=1, completions=completions, clock=time.monotonic
    )
    completions.workers = workers
    workers.start()
    value = make_values(layout, 1)[0]
    workers.submit(Call(Verb.STORE, [value.key], lambda *_: [value.view]))
    assert len(completions.wait(DEADLINE_S)) == 1
    assert completions.open == [1]
    workers.close()
    assert not workers.join(time.monotonic() + DEADLINE_S)
    tier.close()


class _Held(Completions):
    """Lets the worker of a call go while its end is being told, and waits a moment for it."""

    def __init__(self, tier: FaultTier) -> None:
        super().__init__()
        self._tier = tier
        self.returned = threading.Event()

    def put(self, message: Message) -> None:
        if isinstance(message, Returned):
            self.returned.set()
        elif isinstance(message, Completed) and message.is_adrift:
            self._tier.release()
            self.returned.wait(0.2)
        super().put(message)


def test_nobody_hears_that_a_worker_is_back_before_it_was_given_up() -> None:
    """Otherwise its slots are freed first, and kept back for ever after."""
    layout = small_layout()
    clock, tier = FakeClock(), FaultTier(MemoryTier(context_for(layout)))
    completions = _Held(tier)
    workers = TierWorkers("t", tier, load_threads=1, store_threads=1, completions=completions, clock=clock)
    workers.start()
    value = make_values(layout, 1)[0]
    tier.add("load", Fault(FaultKind.HANG))
    workers.submit(Call(Verb.LOAD, [value.key], lambda *_: [value.view], deadline=clock() + 1))
    tier.wait_hanging()
    workers.expire(clock() + 2)
    assert completions.returned.wait(DEADLINE_S)
    workers.close()
    assert not workers.join(time.monotonic() + DEADLINE_S)
    assert [type(message) for message in completions.drain()] == [Completed, Returned]
    tier.close()
