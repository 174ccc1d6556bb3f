"""Blocks in slab files on local disks: the tier that is still warm after a restart."""

from flexkv_core import DriverSpec, hookimpl

from .config import SsdConfig


@hookimpl
def flexkv_driver() -> DriverSpec:
    """The driver ``ssd``."""
    return DriverSpec(name="ssd", api=(1, 0), config=SsdConfig, open="flexkv_driver_ssd.tier:open_tier")
