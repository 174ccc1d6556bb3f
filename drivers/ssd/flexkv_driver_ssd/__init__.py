"""Blocks in slab files on local disks: the tier that is still warm after a restart."""

from flexkv_core import DriverSpec, TierCapabilities, hookimpl

from .config import SsdConfig


@hookimpl
def flexkv_driver() -> DriverSpec:
    """The driver ``ssd``."""
    return DriverSpec(
        name="ssd",
        api=(1, 0),
        config=SsdConfig,
        open="flexkv_driver_ssd.tier:open_tier",
        capabilities=TierCapabilities(persistent=True, can_list=True, alignment_bytes=4096),
    )
