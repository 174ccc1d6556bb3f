"""What is read off a compiled kernel."""

from __future__ import annotations

import struct

import pytest

from flexkv_core.transfers.launch import parameter_format

ENTRY = """
.visible .entry move_rows(
    .param .u64 move_rows_param_0,
    .param .u32 move_rows_param_1,
    .param .u64 .ptr .global .align 1 move_rows_param_2
)
.reqntid 256
{ ld.param.b64 %rd1, [move_rows_param_0]; }
"""


def test_the_order_and_sizes_of_parameters() -> None:
    packing = parameter_format(ENTRY)
    assert packing == "@qiq"
    assert struct.calcsize(packing) == 24


@pytest.mark.parametrize("ptx", [ENTRY.replace(".u32", ".f16"), "", ".entry empty"])
def test_what_is_not_understood_is_left_to_triton(ptx: str) -> None:
    assert parameter_format(ptx) is None


def test_a_kernel_without_parameters() -> None:
    assert parameter_format(".entry nothing()") == "@"
