"""What tests of drivers, transfers and chains are made of; public, and in the wheel.

* ``TierTests``, ``TransferTests``, ``SyncTests``: the conformance kit.  Subclass one, give a factory.
* ``MemoryTier``, ``FaultTier``: a reference tier, and a wrapper that makes any tier misbehave.
* ``FakeDevice``, ``FakeTransfer``, ``FakeClock``, ``ManualExecutor``: the CPU simulation.
* ``make_value``, ``make_values``, ``small_layout``, ``context_for``: valid values.
* ``strategies``: hypothesis strategies (a module).

pytest is needed for the kit and hypothesis for the strategies; neither is imported before such a
name is asked for.  Nothing in ``flexkv_core`` imports this package.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .clock import FakeClock, ManualExecutor
from .device import DeviceViolation, FakeDevice
from .fake_transfer import FakeTransfer
from .fault_plan import Fault, FaultKind, SeededFaults
from .faults import FaultTier
from .memory import Medium, MemoryTier
from .values import (
    Value,
    aligned_buffer,
    context_for,
    kv_payload,
    kv_sums,
    make_value,
    make_values,
    small_layout,
)

if TYPE_CHECKING:
    from .kit import overrides_kit
    from .sync_tests import SyncTests
    from .tier_tests import TierTests
    from .transfer_tests import TransferTests

_KIT_MODULES = (
    "kit",
    "sync_tests",
    "tier_kit",
    "tier_contract",
    "tier_corruption",
    "tier_direct",
    "tier_limits",
    "tier_persistence",
    "tier_threads",
    "transfer_kit",
    "transfer_tests",
)

_LAZY = {
    "SyncTests": "sync_tests",
    "TierTests": "tier_tests",
    "TransferTests": "transfer_tests",
    "overrides_kit": "kit",
}

if "pytest" in sys.modules:  # before the kit is imported, so that its assertions show their values
    for _name in _KIT_MODULES:
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{_name}")


def __getattr__(name: str) -> Any:
    """The kit's classes, imported when they are asked for."""
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DeviceViolation",
    "FakeClock",
    "FakeDevice",
    "FakeTransfer",
    "Fault",
    "FaultKind",
    "FaultTier",
    "ManualExecutor",
    "Medium",
    "MemoryTier",
    "SeededFaults",
    "SyncTests",
    "TierTests",
    "TransferTests",
    "Value",
    "aligned_buffer",
    "context_for",
    "kv_payload",
    "kv_sums",
    "make_value",
    "make_values",
    "overrides_kit",
    "small_layout",
]
