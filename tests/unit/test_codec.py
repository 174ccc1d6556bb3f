"""The codec: what is stored, that nothing comes back unless it is exactly what went in, and its keys."""

from __future__ import annotations

import contextlib
import random

import pytest

from flexkv_core.errors import ConfigError
from flexkv_core.metrics import Metrics
from flexkv_core.models import CodecConfig
from flexkv_core.testing import MemoryTier, aligned_buffer, context_for, make_values, small_layout
from flexkv_core.tier import Status, TierCapabilities
from flexkv_core.wrappers.codec import CodecTier
from flexkv_core.wrappers.encoding import ROOM_BYTES, Encoding, UndecodableError, is_encoded
from flexkv_core.wrappers.verify import VerifiedTier

pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")

LAYOUT = small_layout()
VALUES = make_values(LAYOUT, 4)
ONE, TWO = "11" * 32, "22" * 32
ZSTD = CodecConfig(compress="zstd")
AES = CodecConfig.model_validate({"encrypt": {"key": ONE}})
BOTH = CodecConfig.model_validate({"compress": "zstd", "encrypt": {"key": ONE}})


def encoded(config: CodecConfig, value=VALUES[0]) -> memoryview:
    into = memoryview(bytearray(LAYOUT.slot_bytes + ROOM_BYTES))
    return into[: Encoding(config, LAYOUT).encode(value.key, value.view, into)]


def decoded(config: CodecConfig, stored, value=VALUES[0]) -> memoryview:
    into = memoryview(bytearray(LAYOUT.slot_bytes))
    return into[: Encoding(config, LAYOUT).decode(value.key, memoryview(stored), into)]


def cause(config: CodecConfig, stored, value=VALUES[0]) -> str:
    with pytest.raises(UndecodableError) as caught:
        decoded(config, stored, value)
    return caught.value.cause


@pytest.mark.parametrize("config", [ZSTD, AES, BOTH], ids=["zstd", "aes", "both"])
@pytest.mark.parametrize("length", [1, 100, LAYOUT.header_bytes, LAYOUT.header_bytes + 1, LAYOUT.slot_bytes])
def test_any_bytes_come_back(config, length):
    for data in (bytes(length), random.Random(length).randbytes(length)):
        into = memoryview(bytearray(LAYOUT.slot_bytes + ROOM_BYTES))
        size = Encoding(config, LAYOUT).encode(bytes(32), memoryview(data), into)
        assert size <= length + ROOM_BYTES
        back = memoryview(bytearray(LAYOUT.slot_bytes))
        assert Encoding(config, LAYOUT).decode(bytes(32), into[:size], back) == length
        assert back[:length] == data


def test_what_does_not_shrink_is_left_as_it_is():
    noise = memoryview(random.Random(7).randbytes(LAYOUT.slot_bytes))
    into = memoryview(bytearray(LAYOUT.slot_bytes + ROOM_BYTES))
    assert Encoding(ZSTD, LAYOUT).encode(bytes(32), noise, into) < len(noise) + 100
    assert len(encoded(ZSTD)) < VALUES[0].num_bytes / 2


def test_encryption_hides_tokens_and_payload_and_never_repeats():
    first, second = bytes(encoded(AES)), bytes(encoded(AES))
    plain = bytes(VALUES[0].view[: VALUES[0].num_bytes])
    assert first != second, "a nonce was used twice"
    for at in range(0, len(plain) - 16, 16):
        part = plain[at : at + 16]
        assert part == bytes(16) or part not in first


def test_every_byte_is_authenticated():
    stored = encoded(BOTH)
    for at in range(len(stored)):
        bad = bytearray(stored)
        bad[at] ^= 0x10
        assert cause(BOTH, bad) in ("damaged", "not_encoded", "schema", "not_encrypted", "unknown_key"), at
    for length in range(0, len(stored), 7):
        assert cause(BOTH, stored[:length]) in ("damaged", "not_encoded")


def test_values_and_their_parts_cannot_be_exchanged():
    mine, other = encoded(AES, VALUES[0]), encoded(AES, VALUES[1])
    assert cause(AES, other) == "damaged", "another block's value under this key"
    again = encoded(AES, VALUES[0])
    middle = len(again) - 64
    assert cause(AES, bytes(mine[:middle]) + bytes(again[middle:])) == "damaged"


def test_keys_rotate_by_their_names():
    old = encoded(CodecConfig.model_validate({"encrypt": {"key": ONE, "key_id": "a"}}))
    both = CodecConfig.model_validate({"encrypt": {"key": TWO, "key_id": "b", "old_keys": {"a": ONE}}})
    assert decoded(both, old) == VALUES[0].view
    new = encoded(both)
    only_new = CodecConfig.model_validate({"encrypt": {"key": TWO, "key_id": "b"}})
    assert decoded(only_new, new) == VALUES[0].view
    assert cause(only_new, old) == "unknown_key"
    wrong = CodecConfig.model_validate({"encrypt": {"key": TWO, "key_id": "a"}})
    assert cause(wrong, old) == "damaged"


def test_what_another_configuration_wrote_is_never_served():
    assert cause(ZSTD, encoded(AES)) == "unknown_key"
    assert cause(AES, encoded(ZSTD)) == "not_encrypted"
    assert cause(AES, encoded(BOTH)) == "schema"
    assert cause(ZSTD, VALUES[0].view) == "not_encoded"
    assert cause(ZSTD, b"FLEXKVC\x01" + b"\x63" * 200) == "schema"


@pytest.mark.parametrize("seed", range(20))
def test_junk_behind_a_good_head_writes_no_byte_too_many(seed):
    chance = random.Random(seed)
    stored = bytearray(encoded(ZSTD))
    for _ in range(6):
        stored[chance.randrange(8, len(stored))] = chance.randrange(256)
    room = memoryview(bytearray(b"\xa5") * (LAYOUT.slot_bytes + 64))
    with contextlib.suppress(UndecodableError):
        Encoding(ZSTD, LAYOUT).decode(VALUES[0].key, memoryview(stored), room[: LAYOUT.slot_bytes])
    assert room[LAYOUT.slot_bytes :] == b"\xa5" * 64


# ---- the tier round it -----------------------------------------------------------------------------


def codec_tier(config: CodecConfig, inner: MemoryTier, metrics: Metrics | None = None) -> CodecTier:
    return CodecTier(
        inner,
        Encoding(config, LAYOUT),
        config,
        LAYOUT,
        name="t",
        metrics=metrics or Metrics(),
        num_calls=1,
    )


def test_wrong_key_is_corrupt_and_unknown_key_a_miss_and_both_are_counted():
    inner, metrics = MemoryTier(context_for(LAYOUT)), Metrics()
    keys = [value.key for value in VALUES]
    with codec_tier(AES, inner) as tier:
        tier.store(keys, [value.view for value in VALUES])
        assert all(is_encoded(memoryview(value)) for value in inner.medium.values.values())
        for settings, status, why in (
            ({"key": TWO}, Status.CORRUPT, "damaged"),
            ({"key": TWO, "key_id": "9"}, Status.MISS, "unknown_key"),
        ):
            config = CodecConfig.model_validate({"encrypt": settings})
            other = VerifiedTier(codec_tier(config, inner, metrics), LAYOUT)
            got = other.load(keys, [aligned_buffer(LAYOUT.slot_bytes) for _ in keys])
            assert [outcome.status for outcome in got] == [status] * 4
            assert metrics.value("codec_failures", tier="t", cause=why) == 4


def test_a_tier_without_a_codec_leaves_encoded_values_alone():
    inner = MemoryTier(context_for(LAYOUT))
    value = VALUES[0]
    codec_tier(AES, inner).store([value.key], [value.view])
    (got,) = VerifiedTier(inner, LAYOUT).load([value.key], [aligned_buffer(LAYOUT.slot_bytes + ROOM_BYTES)])
    assert got.status is Status.MISS, "it is another instance's, and corrupt would remove it"


def test_long_batches_go_in_turns_and_keep_their_order(monkeypatch):
    monkeypatch.setattr("flexkv_core.wrappers.codec._BUFFER_BYTES", 2 * (LAYOUT.slot_bytes + ROOM_BYTES))
    inner = MemoryTier(context_for(LAYOUT), TierCapabilities(alignment_bytes=4096))
    values = make_values(LAYOUT, 5)
    keys = [value.key for value in values]
    with codec_tier(BOTH, inner) as tier:
        assert all(outcome.is_ok for outcome in tier.store(keys, [value.view for value in values]))
        assert all(len(kept) % 4096 == 0 for kept in inner.medium.values.values())
        del inner.medium.values[keys[2]]
        views = [aligned_buffer(LAYOUT.slot_bytes) for _ in keys]
        got = tier.load(keys, views)
        assert [outcome.is_ok for outcome in got] == [True, True, False, True, True]
        for i in (0, 1, 3, 4):
            assert values[i].equals(views[i])


def test_a_value_that_is_too_long_is_not_stored_as_it_is():
    inner = MemoryTier(context_for(LAYOUT))
    with codec_tier(AES, inner) as tier:
        long = memoryview(bytearray(LAYOUT.slot_bytes + 1))
        bad, good = tier.store([bytes(32), VALUES[0].key], [long, VALUES[0].view])
    assert (bad.status, good.status) == (Status.INVALID, Status.OK)
    assert list(inner.medium.values) == [VALUES[0].key]


# ---- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["zstandard", "cryptography"])
def test_a_missing_extra_is_named(monkeypatch, package):
    monkeypatch.setattr("flexkv_core.models.find_spec", lambda name: None if name == package else object())
    extra = {"zstandard": "zstd", "cryptography": "crypto"}[package]
    with pytest.raises(ConfigError, match=rf"{package}.*flexkv-core\[{extra}\]"):
        Encoding(BOTH, LAYOUT)


@pytest.mark.parametrize("key", ["", "short", "zz" * 32, "11" * 31, "1" * 43])
def test_a_bad_key_is_refused_and_not_quoted(key):
    with pytest.raises(ValueError, match="32 random bytes") as caught:
        CodecConfig.model_validate({"encrypt": {"key": key}})
    assert not key or key not in str(caught.value)


def test_a_key_may_be_base64_and_shows_in_no_repr():
    import base64

    text = base64.b64encode(bytes(range(32))).decode()
    config = CodecConfig.model_validate({"encrypt": {"key": text, "old_keys": {"0": ONE}}})
    assert text not in repr(config)
    assert ONE not in repr(config)
    with pytest.raises(ValueError, match="new name"):
        CodecConfig.model_validate({"encrypt": {"key": ONE, "key_id": "0", "old_keys": {"0": TWO}}})
