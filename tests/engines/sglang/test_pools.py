"""SGLang's real KV pools as byte planes; pools that cannot be served are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flexkv_core import EngineError, LayoutError, Namespace
from flexkv_core.models import NamespaceConfig

pytest.importorskip("sglang", reason="sglang is not installed (make setup)")
memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
allocators = pytest.importorskip("sglang.srt.mem_cache.allocator")

from flexkv_sglang import identity, pools  # noqa: E402 - after the checks above

SIZE = 256
FIXED = {"size": SIZE, "layer_num": 3, "device": "cpu", "enable_memory_saver": False}


def mha(page: int = 1, dtype: torch.dtype = torch.bfloat16, cls=None, **fields):
    cls = cls or memory_pool.MHATokenToKVPool
    return cls(page_size=page, dtype=dtype, head_num=2, head_dim=16, **{**FIXED, **fields})


def mla(page: int = 1, dtype: torch.dtype = torch.bfloat16, cls=None, **fields):
    cls = cls or memory_pool.MLATokenToKVPool
    return cls(page_size=page, dtype=dtype, kv_lora_rank=32, qk_rope_head_dim=8, **{**FIXED, **fields})


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_mha_planes_are_the_pool(page: int, dtype: torch.dtype) -> None:
    pool = mha(page, dtype)
    planes = pools.device_planes(pool, 128)
    row = 2 * 16 * dtype.itemsize
    assert planes.num_slots == SIZE + page
    assert planes.layout.page_tokens == page
    assert planes.layout.parts[0].dtype == str(dtype).removeprefix("torch.")
    assert planes.layout.token_bytes == 3 * 2 * row
    assert [(p.layer, p.kind, p.row_bytes) for p in planes.layout.planes] == [
        (layer, kind, row) for layer in range(3) for kind in "kv"
    ]
    for layer in range(3):
        pool.k_buffer[layer][7] = layer + 1
        pool.v_buffer[layer][7] = layer + 10
        for plane, buffer in zip(planes.planes[2 * layer :], (pool.k_buffer, pool.v_buffer), strict=False):
            assert plane.data_ptr() == buffer[layer].data_ptr()
            assert torch.equal(plane[7], buffer[layer][7].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("page", [1, 64])
def test_mla_planes_are_the_pool(page: int) -> None:
    pool = mla(page)
    planes = pools.device_planes(pool, 64)
    assert [(p.layer, p.kind, p.row_bytes) for p in planes.layout.planes] == [
        (i, "latent", 80) for i in range(3)
    ]
    planes.planes[1][5] = 255
    assert (pool.kv_buffer[1][5].reshape(-1).view(torch.uint8) == 255).all()
    assert pools.is_replicated(pool)
    assert not pools.is_replicated(mha())


def test_values_may_be_narrower_than_keys() -> None:
    planes = pools.device_planes(mha(v_head_dim=8), 64)
    assert {(p.kind, p.row_bytes) for p in planes.layout.planes} == {("k", 64), ("v", 32)}


def test_rows_may_stand_apart() -> None:
    pool = mha()
    wide = [torch.zeros(SIZE + 1, 4, 16, dtype=torch.bfloat16) for _ in range(3)]
    pool.k_buffer = [buffer[:, :2] for buffer in wide]
    pool.v_buffer = [buffer[:, 2:] for buffer in wide]
    planes = pools.device_planes(pool, 64)
    planes.planes[1][9] = 7
    assert (wide[0][9, 2:].reshape(-1).view(torch.uint8) == 7).all()
    assert not wide[0][9, :2].any()


def test_a_block_is_a_multiple_of_the_page() -> None:
    with pytest.raises(LayoutError, match="multiple"):
        pools.device_planes(mha(64), 48)


def _named(name: str, base: type) -> type:
    return type(name, (base,), {})


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("DSATokenToKVPool", "indexer"),
        ("MLATokenToKVPoolFP4", "scale"),
        ("MHATokenToKVPoolFP4", "scale"),
        ("SWAKVPool", "sliding-window"),
        ("HybridLinearKVPool", "state"),
        ("PageMajorMHATokenToKVPool", "interleaved"),
        ("SomebodysPool", "not known"),
    ],
)
def test_other_pools_are_refused_by_name(name: str, missing: str) -> None:
    pool = mha()
    pool.__class__ = _named(name, memory_pool.MHATokenToKVPool)
    with pytest.raises(LayoutError, match=missing) as error:
        pools.device_planes(pool, 64)
    assert name in str(error.value)
    assert "supported: MHATokenToKVPool, MLATokenToKVPool" in str(error.value)


def test_the_pools_that_are_named_exist() -> None:
    """In the newest version: a name that is gone explains nothing to anybody."""
    root = Path(memory_pool.__file__).parents[1]
    known = {
        name
        for file in root.rglob("*.py")
        for name in re.findall(r"^class (\w*Pool\w*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(pools._MISSING) <= known, set(pools._MISSING) - known


@pytest.mark.parametrize(
    ("attribute", "value", "missing"),
    [
        ("use_hnd", True, "HND"),
        ("k_scale_buffer", [torch.ones(1)], "scale"),
        ("layer_shard_enabled", True, "spread over ranks"),
        ("requires_physical_write_loc", True, "translated"),
        ("kv_cache_layout", "vectorized_5d", "vectorized_5d"),
        ("kv_cache_layout", "page_major", "page_major"),
        ("layer_num", 4, "states 4 layers"),
        ("k_buffer", None, "not a list"),
    ],
)
def test_odd_pools_are_refused(attribute: str, value: object, missing: str) -> None:
    pool = mha()
    setattr(pool, attribute, value)
    with pytest.raises(LayoutError, match=missing):
        pools.device_planes(pool, 64)


def test_unequal_layers_are_refused() -> None:
    pool = mha()
    pool.k_buffer[2] = torch.zeros(SIZE + 1, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"layer 2 has rows of \[32, 64\] B"):
        pools.device_planes(pool, 64)


def test_tensors_that_do_not_fit_are_refused() -> None:
    for tensor, missing in (
        (torch.zeros(SIZE, 2, 16, dtype=torch.bfloat16), "does not hold 257 slots"),
        (torch.zeros(SIZE + 1, 2, 16), "float32"),
        (torch.zeros(SIZE + 1, 16, 2, dtype=torch.bfloat16).transpose(1, 2), "gaps"),
    ):
        pool = mha()
        pool.k_buffer[0] = tensor
        with pytest.raises(LayoutError, match=missing):
            pools.device_planes(pool, 64)


def test_bytes_must_add_up() -> None:
    pool = mha()
    stated = pool.get_kv_size_bytes()
    pool.get_kv_size_bytes = lambda: (stated[0] + 4096, stated[1])
    with pytest.raises(LayoutError, match="states .* B of KV"):
        pools.device_planes(pool, 64)


def test_allocators() -> None:
    pool = mha(16)
    fixed = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": pool, "need_sort": False}
    good = allocators.PagedTokenToKVPoolAllocator(SIZE, page_size=16, **fixed)
    pools.check_allocator(good)
    wide = allocators.PagedTokenToKVPoolAllocator(SIZE, page_size=32, **fixed)
    with pytest.raises(LayoutError, match="pages of 32 tokens over a pool with pages of 16"):
        pools.check_allocator(wide)
    with pytest.raises(LayoutError, match="SimpleNamespace is not supported"):
        pools.check_allocator(SimpleNamespace(page_size=1))


def _context(path: str, **args: object) -> SimpleNamespace:
    config = SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": path}, _commit_hash=None)
    model = SimpleNamespace(model_path=path, hf_config=config, dtype=torch.bfloat16, quantization=None)
    given = {"revision": None, "load_format": "auto", "pp_size": 1, "quantization": None, **args}
    return SimpleNamespace(model_config=model, server_args=SimpleNamespace(**given), tp_rank=0, tp_size=1)


def test_identity_tells_models_apart(tmp_path) -> None:
    pool = mha()
    layout = pools.device_planes(pool, 64).layout
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(3 * identity.SAMPLE_BYTES))

    def namespace(**args: object) -> Namespace:
        return identity.model_namespace(_context(str(folder), **args), pool, layout)

    first = namespace()
    assert first == namespace()
    assert first.kv_dtype == "bfloat16"
    assert first.rank_slice == "replicated"
    assert first.layout == layout.fingerprint.hex()
    assert first.differences(namespace(revision="v2")) == ["revision"]
    assert namespace(load_format="dummy").revision.startswith("dummy.")
    assert first.differences(namespace(quantization="fp8")) == ["revision"]
    weights.write_bytes(bytes(3 * identity.SAMPLE_BYTES - 1) + b"\1")
    assert first.differences(namespace()) == ["revision"]


def test_identity_sees_the_middle_of_a_weight_file(tmp_path) -> None:
    pool = mha()
    layout = pools.device_planes(pool, 64).layout
    weights = tmp_path / "model.safetensors"
    size = 16 << 20
    weights.write_bytes(bytes(size))
    first = identity.model_namespace(_context(str(tmp_path)), pool, layout)
    changed = bytearray(size)
    changed[size // 2 : size // 2 + (1 << 20)] = b"\1" * (1 << 20)
    weights.write_bytes(changed)
    assert first.differences(identity.model_namespace(_context(str(tmp_path)), pool, layout)) == ["revision"]


@pytest.mark.parametrize(
    ("field", "value"), [("model", "ours"), ("revision", "r7"), ("weights_version", "7")]
)
def test_what_the_user_says_of_the_model_counts(field: str, value: str) -> None:
    pool = mha()
    layout = pools.device_planes(pool, 64).layout
    said = NamespaceConfig.model_validate({field: value})
    plain = identity.model_namespace(_context("m"), pool, layout)
    found = identity.model_namespace(_context("m"), pool, layout, configured=said)
    assert plain.differences(found) == [field]
    assert getattr(found, field) == value
    assert plain.digest() != found.digest()


def test_another_dtype_than_the_pools_is_refused() -> None:
    pools.check_dtype(mha(), None)
    pools.check_dtype(mha(), "bfloat16")
    with pytest.raises(LayoutError, match="float16 in the configuration and bfloat16 in"):
        pools.check_dtype(mha(), "float16")


@pytest.mark.parametrize("device", ["xpu", "hpu", "meta"])
def test_a_device_whose_streams_are_not_known_is_refused(device: str) -> None:
    """Nothing would order a copy behind the pass that writes what it reads."""
    from flexkv_sglang.transfers import open_transfer

    with pytest.raises(EngineError, match=f"cuda and cpu devices; SGLang's lies on {device}"):
        open_transfer(SimpleNamespace(device=torch.device(device)), None, None)


def test_identity_of_ranks() -> None:
    context = _context("m")
    context.tp_size, context.tp_rank = 4, 3
    assert identity.rank_slice_of(context, mha()) == "tp3/4"
    assert identity.rank_slice_of(context, mla()) == "replicated"


def test_adapters_are_named_by_their_files(tmp_path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    refs = {"id1": SimpleNamespace(lora_path=str(tmp_path)), "id2": SimpleNamespace(lora_path="hub/name")}
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs)))
    digests = identity.AdapterDigests(worker)
    refs["id1"].lora_name = "style"
    assert digests.name("") == ""
    assert digests.name("id9") == "id9"
    assert identity.AdapterDigests(worker).name("id1") == "style", "an id is another at each load"
    assert digests.of("") == ""
    assert digests.of("id2") == digests.of("id2"), "files out of reach: good for this process"
    assert digests.of("id2") != identity.AdapterDigests(worker).of("id2"), "... and for no other one"
    assert digests.of("id9").startswith("id9.")
    before = digests.of("id1")
    assert len(before) == 32
    (tmp_path / "adapter_model.safetensors").write_bytes(b"retrain")
    assert digests.of("id1") == before, "read when it is loaded, not when it is used"
    assert identity.AdapterDigests(worker).of("id1") != before
    assert digests.loaded("id1"), "the same id with another content"
    assert digests.of("id1") != before
    assert not digests.loaded("id1")
    assert not digests.loaded("id3"), "a new one"
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors").mkdir()
    assert digests.loaded("id1"), "files that cannot be read are none"
    assert digests.of("id1").startswith("id1.")
    unknown = digests.of("id2")
    assert digests.loaded("id2"), "nobody can tell whether it is the same"
    assert digests.of("id2") != unknown
