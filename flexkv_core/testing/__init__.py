"""What tests of drivers, transfers and chains are made of; public, and in the wheel.

* ``TierTests``, ``TransferTests``, ``SyncTests``: the conformance kit.  Subclass one, give a factory.
* ``MemoryTier``, ``FaultTier``: a reference tier, and a wrapper that makes any tier misbehave.
* ``FakeDevice``, ``FakeTransfer``, ``FakeClock``, ``ManualExecutor``: the CPU simulation.
* ``make_value``, ``make_values``, ``small_layout``, ``context_for``: valid values.
* ``strategies``: hypothesis strategies (a module).

pytest is needed for the kit and hypothesis for the strategies; neither is imported before such a
name is asked for.  Nothing in ``flexkv_core`` imports this package.
"""

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
    "Value",
    "aligned_buffer",
    "context_for",
    "kv_payload",
    "kv_sums",
    "make_value",
    "make_values",
    "small_layout",
]
