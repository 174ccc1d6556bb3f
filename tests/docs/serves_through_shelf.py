"""Store a prompt through ``chain.yaml``, start again, and load it back from the reader's driver."""

from __future__ import annotations

import time

from flexkv_core import Namespace
from flexkv_core.config import load_config
from flexkv_core.manager import KVManager, KVResponseStatus
from flexkv_core.testing import FakeClock, FakeDevice, FakeTransfer, small_layout

TOKENS = list(range(64))
DEADLINE_S = 120.0


def open_manager(device: FakeDevice) -> KVManager:
    """One engine process."""
    config = load_config("chain.yaml", environ={}).chain
    transfer = FakeTransfer(device)
    clock = FakeClock()  # which stands: nothing comes too late because the machine is slow
    namespace = Namespace(model="m")
    manager = KVManager(config, layout=device.layout, namespace=namespace, transfer=transfer, clock=clock)
    manager.start()
    return manager


def store(manager: KVManager, device: FakeDevice) -> None:
    """Compute the prompt and store it, as far down as the chain goes."""
    slots = device.allocate(len(TOKENS))
    device.forward(slots, TOKENS)
    task, mask = manager.put_match(TOKENS)
    assert mask.all()
    manager.launch([task], [slots])
    assert manager.wait([task])[task].status is KVResponseStatus.SUCCESS
    assert manager.drain(DEADLINE_S)


def load(manager: KVManager, device: FakeDevice) -> dict[str, int]:
    """Load the prompt into other slots and check every byte; where it was, by tier."""
    until = time.monotonic() + DEADLINE_S
    while not manager.lookup(TOKENS).num_tokens and time.monotonic() < until:
        manager.prefetch_async(TOKENS)  # asks the shared tier
        manager.drain(DEADLINE_S)
    origin = manager.lookup(TOKENS).tokens_by_tier
    task, mask = manager.get_match(TOKENS)
    assert mask.all()
    slots = device.allocate(len(TOKENS))
    manager.launch([task], [slots])
    assert manager.wait([task])[task].status is KVResponseStatus.SUCCESS
    device.check(slots, TOKENS)
    return origin


def main() -> None:
    """Two processes' worth of an engine."""
    first = FakeDevice(small_layout())
    manager = open_manager(first)
    store(manager, first)
    manager.shutdown()
    second = FakeDevice(small_layout())
    manager = open_manager(second)
    origin = load(manager, second)
    manager.shutdown()
    assert origin == {"shelf": len(TOKENS)}, origin
    print("served from", origin)


if __name__ == "__main__":
    main()
