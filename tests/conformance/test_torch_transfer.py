"""The torch transfer passes the kit for transfers, on pools in host memory."""

from __future__ import annotations

import torch

from flexkv_core.testing import TransferTests
from flexkv_core.transfers.torch_copy import TorchTransfer
from tests.support.transfer_pools import make_planes


class TestTorchTransfer(TransferTests):
    def open_transfer(self, layout, num_slots):
        planes = make_planes(layout, num_slots, self.seed)
        transfer = TorchTransfer(planes)
        self.planes = planes.planes
        return transfer

    def write_rows(self, transfer, plane, slots, rows):
        data = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
        self.planes[plane][list(slots)] = data.view(len(slots), -1)

    def read_rows(self, transfer, plane, slots):
        return self.planes[plane][list(slots)].numpy().tobytes()


class TestStridedPlanes(TestTorchTransfer):
    """Rows that are parts of wider ones, as some engines interleave K and V."""

    def open_transfer(self, layout, num_slots):
        planes = make_planes(layout, num_slots, self.seed, gap=24)
        self.planes = planes.planes
        return TorchTransfer(planes)


class TestTensorsOfSlots(TestTorchTransfer):
    """Device slots as a tensor, as SGLang passes them."""

    def device_slots(self, slots):
        return torch.tensor(list(slots), dtype=torch.int64)
