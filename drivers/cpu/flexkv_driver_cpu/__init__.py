"""Blocks in this machine's memory: the tier that the device copies to and from."""

from flexkv_core import DriverSpec, TierCapabilities, hookimpl

from .config import CpuConfig


@hookimpl
def flexkv_driver() -> DriverSpec:
    """The driver ``cpu``."""
    return DriverSpec(
        name="cpu",
        api=(1, 0),
        config=CpuConfig,
        open="flexkv_driver_cpu.tier:open_tier",
        capabilities=TierCapabilities(direct_slots=True),
    )
