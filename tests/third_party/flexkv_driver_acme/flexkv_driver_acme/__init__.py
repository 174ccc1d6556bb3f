"""Blocks in an Acme store."""

from flexkv_core import DriverSpec, hookimpl

from .config import AcmeConfig


@hookimpl
def flexkv_driver() -> DriverSpec:
    """The driver ``acme``."""
    return DriverSpec(name="acme", api=(1, 0), config=AcmeConfig, open="flexkv_driver_acme.tier:open_tier")
