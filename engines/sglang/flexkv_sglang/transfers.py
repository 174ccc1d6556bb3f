"""Which transfer serves this device."""

from __future__ import annotations

import logging
from typing import Any

from flexkv_core import EngineError, Transfer
from flexkv_core.metrics import Metrics
from flexkv_core.transfers.planes import DevicePlanes

from . import compat

logger = logging.getLogger(__name__)


def open_transfer(planes: DevicePlanes, ctx: Any, metrics: Metrics) -> Transfer:
    """Start the transfer for the pool's device.

    On CUDA every fence is taken on both of the engine's streams: the scheduler's, which writes the
    request's rows, and the model's, which writes KV and may run behind it (HS-1, HS-2, HS-17).

    Args:
        planes: The pool.
        ctx: SGLang's ``TreeCacheBuildContext``.
        metrics: Where copies are counted.

    Raises:
        EngineError: another device than these: on which streams it works is not known, so no copy could be
            ordered behind the pass that writes what it reads.
        TransferError: a CUDA device without driver or triton.
    """
    if planes.device.type not in ("cpu", "cuda"):
        raise EngineError(
            f"flexkv copies to and from KV pools on cuda and cpu devices; SGLang's lies on {planes.device}"
        )
    if planes.device.type == "cpu":
        from flexkv_core.transfers.torch_copy import TorchTransfer

        return TorchTransfer(planes)
    import torch

    from flexkv_core.transfers.cuda_copy import CudaTransfer

    forward = compat.forward_stream(ctx)

    def streams() -> list[Any]:
        current = torch.cuda.current_stream(planes.device)
        return [current] if forward is None or forward == current else [current, forward]

    return CudaTransfer(planes, streams=streams, metrics=metrics)
