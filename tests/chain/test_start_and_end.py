"""A start that fails leaves nothing behind, and an end in which something fails closes all the rest."""

from __future__ import annotations

import threading

import pytest

from flexkv_core import ChainConfig, Namespace
from flexkv_core.chain import TierChain
from flexkv_core.errors import ConfigError, DriverError
from flexkv_core.manager import KVManager
from flexkv_core.testing import FakeDevice, FakeTransfer, MemoryTier, context_for, small_layout
from flexkv_core.tier import TierCapabilities
from tests.support.chains import World, cpu_tier
from tests.support.waiting import wait_until

LAYOUT = small_layout()
KINDS = {
    "addressable and own": lambda: [cpu_tier(LAYOUT, 8), memory()],
    "addressable and shared": lambda: [cpu_tier(LAYOUT, 8), memory(shared=True)],
    "staging": lambda: [memory(can_list=True), memory(shared=True)],
}


class Broken(Exception):
    """Raised by the part that a test breaks."""


def memory(**can) -> MemoryTier:
    return MemoryTier(context_for(LAYOUT), TierCapabilities(**can))


def broken(*_args, **_kwargs):
    raise Broken


def core_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("flexkv-")}


def config(tiers) -> ChainConfig:
    rows = [{"name": f"tier{number}", "driver": "test"} for number, _ in enumerate(tiers)]
    return ChainConfig.model_validate({"block_tokens": LAYOUT.block_tokens, "tiers": rows})


def last_start_fails(monkeypatch) -> None:
    """The machine gives one thread less than the chain wants."""
    start, left = threading.Thread.start, [3]

    def fewer(thread):
        left[0] -= 1
        if not left[0]:
            raise Broken
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fewer)


STARTS = {
    "transfer": lambda patch, transfer, _tiers: patch.setattr(transfer, "register", broken),
    "first tier": lambda patch, _transfer, tiers: patch.setattr(tiers[0], "register", broken),
    "last tier": lambda patch, _transfer, tiers: patch.setattr(tiers[-1], "register", broken),
    "wrappers": lambda patch, _transfer, _tiers: patch.setattr("flexkv_core.chain.chain.wrap", broken),
    "threads": lambda patch, _transfer, _tiers: last_start_fails(patch),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", STARTS)
def test_a_chain_that_cannot_be_made_leaves_no_thread(kind, part, monkeypatch):
    transfer, tiers = FakeTransfer(FakeDevice(LAYOUT, 64)), KINDS[kind]()
    before = core_threads()
    STARTS[part](monkeypatch, transfer, tiers)
    with pytest.raises(Broken):
        TierChain(config=config(tiers), layout=LAYOUT, tiers=tiers, transfer=transfer)
    wait_until(lambda: core_threads() <= before, "its threads have ended")
    assert not any(region.is_open for region in transfer.regions) or kind != "staging"
    for tier in tiers:
        tier.close()
    transfer.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["transfer", 0, 1])
def test_what_fails_to_close_keeps_nothing_else_open(kind, part, monkeypatch, caplog):
    tiers, before = KINDS[kind](), core_threads()
    world = World([(tier, {}) for tier in tiers], layout=LAYOUT)
    world.store(range(3 * LAYOUT.block_tokens))
    closed = []
    parts = {"transfer": world.transfer, 0: tiers[0], 1: tiers[1]}
    closers = {name: one.close for name, one in parts.items()}
    for name, one in parts.items():
        monkeypatch.setattr(one, "close", lambda name=name: broken() if name == part else closed.append(name))
    world.close()
    world.close()
    assert set(closed) == set(parts) - {part}
    assert "failed" in caplog.text
    wait_until(lambda: core_threads() <= before, "its threads have ended")
    for close in closers.values():
        close()


@pytest.mark.parametrize("is_started", [False, True])
def test_a_manager_without_a_chain_closes_its_transfer(is_started):
    transfer = FakeTransfer(FakeDevice(LAYOUT, 64))
    manager = KVManager(config([None]), layout=LAYOUT, namespace=Namespace(model="test"), transfer=transfer)
    if is_started:
        with pytest.raises((ConfigError, DriverError)):  # no driver has this name
            manager.start()
    manager.shutdown()
    manager.shutdown()
    assert transfer.is_closed
