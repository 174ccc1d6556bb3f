"""Keys: golden values, chaining, separation, and every way tokens come in."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core.keys import (
    BlockChain,
    Namespace,
    block_key,
    common_tokens,
    decode_tokens,
    distinct,
    encode_tokens,
    short,
)
from flexkv_core.testing.strategies import namespaces, prompts, token_lists

FULL = Namespace(
    model="qwen3-0.6b",
    revision="c1899de",
    weights_version="2",
    kv_dtype="bfloat16",
    layout="00" * 16,
    block_tokens=16,
    rank_slice="tp0of2",
    adapter="lora",
    adapter_digest="d1",
    extra_key="x",
    cache_salt="tenant",
)


class TestGolden:
    """What is stored today must be found tomorrow: these digests change only with KEY_SCHEMA."""

    def test_namespaces(self):
        assert (
            Namespace().digest().hex() == "d49e05a0be3549da68ef5f85daa0651dec253e6887e78cfd8361ca5c269ab578"
        )
        assert FULL.digest().hex() == "6d36ed9aaf1a0023ab212e3b1f2a2ce9cff4b45ca5bb211433ebd29aa82fcea4"

    def test_chain(self):
        chain = BlockChain(FULL.digest(), 4, encode_tokens([1, 2, 3, 4, -5, 0, 2**63 - 1, -(2**63), 9]))
        keys = chain.keys()
        assert [key.hex() for key in keys] == [
            "89cc1ed1420947604e91a9dd1f41bfe5de27da64809b7489b19b200bb6692356",
            "1687c2c342643923e951da50abd65119da8ed88720055e989f87982c6ff40db9",
        ]
        assert chain.tail_key(9).hex() == "5a8deda280677ff018c1ff78bf906ddf4b3ab3a2d25574f5ee519a7b2c792c3a"

    def test_key_is_what_the_text_says(self):
        parent, tokens = bytes(range(32)), encode_tokens([7, 8])
        assert block_key(parent, tokens) == sha256(b"flexkv.block.1\0" + parent + tokens).digest()

    def test_tokens_are_little_endian_int64(self):
        assert encode_tokens([1, -1]) == b"\x01" + bytes(7) + b"\xff" * 8


class TestEncode:
    @given(token_lists())
    def test_round_trip(self, tokens):
        assert decode_tokens(encode_tokens(tokens)) == tokens

    @given(token_lists())
    def test_every_container_gives_the_same_bytes(self, tokens):
        import numpy as np

        wanted = encode_tokens(tokens)
        assert encode_tokens(tuple(tokens)) == wanted
        assert encode_tokens(array("q", tokens)) == wanted
        assert encode_tokens(iter(tokens)) == wanted
        assert encode_tokens(np.array(tokens, dtype=np.int64)) == wanted
        assert encode_tokens(np.array([*tokens, *tokens], dtype=np.int64)[: len(tokens)]) == wanted

    def test_narrow_and_strided_arrays(self):
        import numpy as np

        wanted = encode_tokens([1, 2, 3])
        assert encode_tokens(np.array([1, 2, 3], dtype=np.int32)) == wanted
        assert encode_tokens(np.array([1, 9, 2, 9, 3, 9])[::2]) == wanted
        assert encode_tokens(array("i", [1, 2, 3])) == wanted
        assert encode_tokens(np.array([2**32 - 1], dtype=np.uint32)) == encode_tokens([2**32 - 1])

    def test_torch_tensors(self):
        torch = pytest.importorskip("torch")
        assert encode_tokens(torch.tensor([1, 2, 3])) == encode_tokens([1, 2, 3])
        assert encode_tokens(torch.tensor([1, 2, 3], dtype=torch.int32)) == encode_tokens([1, 2, 3])

    def test_copy_is_private(self):
        tokens = array("q", [1, 2])
        encoded = encode_tokens(tokens)
        tokens[0] = 9
        assert decode_tokens(encoded) == [1, 2]

    @pytest.mark.parametrize("tokens", [[2**63], [-(2**63) - 1], [1.5], ["a"], [None], 5, None, "ab"])
    def test_what_is_no_token_is_refused(self, tokens):
        with pytest.raises(ValueError, match="token ids must"):
            encode_tokens(tokens)

    def test_arrays_that_are_no_tokens_are_refused(self):
        import numpy as np

        for wrong in (
            np.zeros(3),
            np.zeros((2, 2), dtype=np.int64),
            np.array(5),
            np.array([2**63], dtype=np.uint64),
            np.array([True]),
        ):
            with pytest.raises(ValueError, match="token ids must"):
                encode_tokens(wrong)


class TestNamespace:
    def test_every_field_separates(self):
        for field in fields(Namespace):
            value = getattr(FULL, field.name)
            other = replace(FULL, **{field.name: value + 1 if isinstance(value, int) else value + "'"})
            assert other.digest() != FULL.digest(), field.name
            assert FULL.differences(other) == [field.name]
        assert FULL.differences(FULL) == []

    @given(namespaces(), namespaces())
    def test_equal_digests_mean_equal_namespaces(self, a, b):
        assert (a.digest() == b.digest()) == (a == b)

    def test_values_do_not_run_into_each_other(self):
        assert Namespace(model="ab", revision="c").digest() != Namespace(model="a", revision="bc").digest()
        assert Namespace(adapter="x").digest() != Namespace(cache_salt="x").digest()

    def test_for_request_replaces_all_of_a_requests_separators(self):
        asked = FULL.for_request(cache_salt="other")
        assert (asked.adapter, asked.adapter_digest, asked.extra_key, asked.cache_salt) == (
            "",
            "",
            "",
            "other",
        )
        assert asked.model == FULL.model
        assert FULL.for_request(adapter=None) == replace(FULL, **dict.fromkeys(SEPARATORS, ""))

    def test_lone_surrogates_are_text_too(self):
        assert len(Namespace(extra_key="\ud800").digest()) == 32


SEPARATORS = ("adapter", "adapter_digest", "extra_key", "cache_salt")


class TestChain:
    @given(prompts(), st.integers(1, 8))
    def test_equal_keys_mean_equal_prefixes(self, sequences, size):
        """A key names a block and all before it, in both directions."""
        prefix_of = {}
        for tokens in sequences:
            chain = BlockChain(bytes(32), size, encode_tokens(tokens))
            for block, key in enumerate(chain.keys()):
                prefix = tuple(tokens[: (block + 1) * size])
                assert prefix_of.setdefault(key, prefix) == prefix
        assert len(set(prefix_of.values())) == len(prefix_of)

    @given(token_lists(), st.integers(1, 8), st.randoms(use_true_random=False))
    def test_order_of_asking_does_not_matter(self, tokens, size, chance):
        plain = BlockChain(bytes(32), size, encode_tokens(tokens)).keys()
        chain = BlockChain(bytes(32), size, encode_tokens(tokens))
        for block in chance.sample(range(len(plain)), len(plain)):
            assert chain.key(block) == plain[block]
            assert chain.parent(block) == (plain[block - 1] if block else bytes(32))
            assert block_key(chain.parent(block), chain.block(block)) == plain[block]
        assert chain.keys() == plain

    @given(token_lists(min_size=1), st.integers(1, 8), st.data())
    def test_tail_key_is_the_key_of_what_is_left(self, tokens, size, data):
        num_tokens = data.draw(st.integers(1, len(tokens)))
        chain = BlockChain(bytes(32), size, encode_tokens(tokens))
        start = (num_tokens - 1) // size * size
        parent = chain.parent(start // size)
        assert chain.tail_key(num_tokens) == block_key(parent, encode_tokens(tokens[start:num_tokens]))

    @pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
    def test_lengths_round_a_block(self, length):
        chain = BlockChain(bytes(32), 4, encode_tokens(range(length)))
        assert chain.num_tokens == length
        assert chain.num_full_blocks == len(chain.keys()) == length // 4
        assert chain.keys(0) == []
        for beyond in (length // 4, -1):
            with pytest.raises(IndexError):
                chain.key(beyond)

    def test_block_is_cut_at_the_end(self):
        chain = BlockChain(bytes(32), 4, encode_tokens(range(6)))
        assert decode_tokens(chain.block(0)) == [0, 1, 2, 3]
        assert decode_tokens(chain.block(1)) == [4, 5]
        assert decode_tokens(chain.block(0, 2)) == [0, 1]
        assert chain.block(2) == b""

    def test_keys_are_made_when_asked_for(self):
        chain = BlockChain(bytes(32), 4, encode_tokens(range(400)))
        chain.key(0)
        assert len(chain._keys) == 1


class TestSmall:
    @given(token_lists(), token_lists(), token_lists())
    def test_common_tokens(self, head, a, b):
        wanted = 0
        for x, y in zip(head + a, head + b, strict=False):
            if x != y:
                break
            wanted += 1
        assert common_tokens(encode_tokens(head + a), encode_tokens(head + b)) == wanted
        assert common_tokens(memoryview(encode_tokens(head + a)), encode_tokens(head + b)) == wanted

    def test_short_and_distinct(self):
        assert short(bytes(range(32))) == "000102030405"
        assert distinct([b"b", b"a", b"b"]) == [b"b", b"a"]
