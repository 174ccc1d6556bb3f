"""Which transfer serves this device."""

from __future__ import annotations

from typing import Any

from flexkv_core import Transfer
from flexkv_core.transfers.planes import DevicePlanes


def open_transfer(planes: DevicePlanes, ctx: Any) -> Transfer:  # noqa: ARG001 - a GPU needs its streams
    """Start the transfer for the pool's device.

    Args:
        planes: The pool.
        ctx: SGLang's ``TreeCacheBuildContext``.
    """
    from flexkv_core.transfers.torch_copy import TorchTransfer

    return TorchTransfer(planes)
