"""The device's side of a copy: an engine's KV pool as byte rows, one tensor a plane.

Strides and pointers are those of the engine's live tensors: a plane may be packed or a strided
part of an interleaved pool.  What does not fit is refused by name before anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..layout import BlockLayout


@dataclass(frozen=True, eq=False)
class DevicePlanes:
    """A KV pool, plane by plane.

    Attributes:
        layout: What a block of these planes means.
        planes: In the order of ``layout.planes``; each a uint8 tensor ``[num_slots, row_bytes]``
            whose rows may stand apart (``stride(0) >= row_bytes``) and have no gap
            (``stride(1) == 1``).  All on one device.
        num_slots: Device slots: one token's rows each, at the same index in every plane.
    """

    layout: BlockLayout
    planes: tuple[torch.Tensor, ...]
    num_slots: int

    def __post_init__(self) -> None:
        wanted = self.layout.planes
        if len(self.planes) != len(wanted):
            raise LayoutError(f"the layout has {len(wanted)} planes, the pool has {len(self.planes)}")
        for number, (plane, tensor) in enumerate(zip(wanted, self.planes, strict=True)):
            fault = self._fault(tensor, plane.row_bytes)
            if fault:
                raise LayoutError(f"plane {number} (layer {plane.layer}, {plane.kind}): {fault}")

    def _fault(self, tensor: torch.Tensor, row_bytes: int) -> str:
        """What keeps this tensor from being a plane; empty if nothing does."""
        if tensor.dtype != torch.uint8 or tensor.dim() != 2:
            return f"a 2-D uint8 view is needed, this is {tensor.dim()}-D {tensor.dtype}"
        if tuple(tensor.shape) != (self.num_slots, row_bytes):
            return f"shape {tuple(tensor.shape)}, the layout needs {(self.num_slots, row_bytes)}"
        if row_bytes > 1 and tensor.stride(1) != 1:
            return f"the bytes of a row stand {tensor.stride(1)} apart"
        if self.num_slots > 1 and tensor.stride(0) < row_bytes:
            return f"rows of {row_bytes} B stand {tensor.stride(0)} B apart and overlap"
        if tensor.device != self.device:
            return f"on {tensor.device}, the first plane on {self.device}"
        return ""

    @property
    def device(self) -> torch.device:
        """Where the planes lie."""
        return self.planes[0].device

    @property
    def layers(self) -> list[list[int]]:
        """Per layer the numbers of its planes, in storage order."""
        layers: list[list[int]] = [[] for _ in range(self.layout.num_layers)]
        for number, plane in enumerate(self.layout.planes):
            layers[plane.layer].append(number)
        return layers

    def poison(self, slots: Sequence[int], value: int = 0xDB) -> None:
        """For tests and debugging: overwrite freed slots, so that a late read of them shows.

        Queued on the calling thread's current stream.
        """
        chosen = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        for plane in self.planes:
            plane.index_fill_(0, chosen, value)
