"""The end of a call, as the chain's thread sees it."""

from __future__ import annotations

import time

from flexkv_core.executor import Call, Completions, Message, TierWorkers, Verb
from flexkv_core.testing import MemoryTier, context_for, make_values, small_layout


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
    value = make_values(layout, 1)[0]
    workers.submit(Call(Verb.STORE, [value.key], [value.view]))
    assert len(completions.wait(10.0)) == 1
    assert completions.open == [1]
    workers.close()
    assert not workers.join(time.monotonic() + 10.0)
    tier.close()
