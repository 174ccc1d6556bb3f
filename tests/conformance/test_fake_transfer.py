"""The fake transfer passes the kit for transfers: what is scripted with it is a real transfer's contract."""

from __future__ import annotations

from flexkv_core.testing import FakeDevice, FakeTransfer, TransferTests


class TestFakeTransfer(TransferTests):
    def open_transfer(self, layout, num_slots):
        device = FakeDevice(layout, num_slots)
        device.allocate(num_slots - 1)
        return FakeTransfer(device)

    def write_rows(self, transfer, plane, slots, rows):
        size = transfer.layout.planes[plane].row_bytes
        for at, slot in enumerate(slots):
            transfer.device.planes[plane][slot * size : (slot + 1) * size] = rows[at * size : (at + 1) * size]

    def read_rows(self, transfer, plane, slots):
        size = transfer.layout.planes[plane].row_bytes
        return b"".join(transfer.device.planes[plane][slot * size : (slot + 1) * size] for slot in slots)

    def run_queued(self, transfer):
        transfer.run_all()
