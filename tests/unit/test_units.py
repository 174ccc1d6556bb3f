import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core.units import (
    KV_DTYPE_NAMES,
    exact_bytes,
    format_bytes,
    parse_bytes,
    parse_kv_dtype,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 GB", 8_000_000_000),
        ("8G", 8_000_000_000),
        ("8Gi", 8 << 30),
        ("1.5 MiB", 1_572_864),
        ("500mb", 500_000_000),
        ("2TiB", 2 << 40),
        ("7b", 7),
        (8, 8),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8XB", "-8GiB", "8 G i B", "5i", "nan", "1e9", "9" * 400, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="must be a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30.0),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("7us", 7e-6),
        ("3", 3.0),
    ],
)
def test_durations(text, seconds):
    assert math.isclose(parse_seconds(text), seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1 fortnight", False])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="must be a duration"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", None),
        ("fp8", "float8_e4m3fn"),
        ("float8", "float8_e4m3fn"),
        ("e4m3", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("mxfp8", "float8_e4m3fn"),
        ("fp16", "float16"),
        ("float16", "float16"),
        ("BF16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp32", "float32"),
        ("float32", "float32"),
        ("nvfp4", "uint8"),
        ("fp4", "uint8"),
        ("e2m1", "uint8"),
        ("fp4_e2m1", "uint8"),
        ("fp4_mx_block16", "uint8"),
        (None, None),
    ],
)
def test_kv_dtypes(name, dtype):
    assert parse_kv_dtype(name) == dtype


def test_unknown_kv_dtype_is_never_taken_for_another():
    with pytest.raises(ValueError, match="must be auto or one of"):
        parse_kv_dtype("fp8_e6m1")


def test_every_kv_dtype_names_itself():
    assert all(parse_kv_dtype(dtype) == dtype for dtype in KV_DTYPE_NAMES.values())


@given(st.integers(min_value=0, max_value=1 << 60))
def test_exact_sizes_come_back(size):
    assert parse_bytes(exact_bytes(size)) == size


def test_sizes_for_people():
    assert format_bytes(512) == "512 B"
    assert format_bytes(8 << 30) == "8.0 GiB"
    assert format_bytes(5 << 50) == "5120.0 TiB"
