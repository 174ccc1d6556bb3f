"""SGLang's KV pools as a block layout and byte planes, or a refusal that says what is missing.

Shapes, strides and pointers are read from the live tensors, never computed from the model's
configuration; what they add up to must equal what the pool says that it holds.

Two kinds are supported: ``MHATokenToKVPool`` (a K and a V tensor per layer) and ``MLATokenToKVPool``
(one latent tensor per layer).  The class must be exactly one of these: a subclass stores more, or
otherwise, and restoring half of a model's state gives wrong answers (HS-15, HS-16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexkv_core import BlockLayout, LayoutError, PartLayout, Plane
from flexkv_core.transfers.planes import DevicePlanes

SUPPORTED_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
SUPPORTED_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")

_MISSING = {
    "MHATokenToKVPoolFP4": "its scale buffers would not be kept",
    "MHATokenToKVPoolMXFP8": "its scale buffers would not be kept",
    "MLATokenToKVPoolFP4": "its scale buffers would not be kept",
    "NoOpMHATokenToKVPool": "it keeps no KV",
    "PageMajorMHATokenToKVPool": "its layers are interleaved page by page",
    "HybridLinearKVPool": "its state beside the KV would not be kept",
    "DSATokenToKVPool": "its indexer buffers would not be kept",
    "PageInterleaveMHATokenToKVPool": "its pages are spread over ranks",
    "PageInterleaveMLATokenToKVPool": "its pages are spread over ranks",
    "UnifiedMHATokenToKVPool": "its slots move while they are copied",
    "UnifiedMLATokenToKVPool": "its slots move while they are copied",
    "DeepSeekV4TokenToKVPool": "its compressed and sliding-window buffers would not be kept",
    "MHATokenToKOnlyPool": "it keeps keys without values",
    "MiniMaxSparseKVPool": "its index keys would not be kept",
    "SWAKVPool": "its sliding-window layers have slots of their own",
    "BaseSWAKVPool": "its sliding-window layers have slots of their own",
}
_FORBIDDEN = (
    ("use_hnd", "heads stand outside tokens in it (HND)"),
    ("is_quantized_kv_cache", "its scale buffers would not be kept"),
    ("k_scale_buffer", "its scale buffers would not be kept"),
    ("kv_scale_buffer", "its scale buffers would not be kept"),
    ("layer_shard_enabled", "its layers are spread over ranks"),
    ("requires_physical_write_loc", "its slots are translated before they are used"),
    ("host_transfer_translate", "its slots are translated before they are used"),
    ("use_dsa", "its indexer buffers would not be kept"),
)


def device_planes(pool: Any, block_tokens: int, page_tokens: int | None = None) -> DevicePlanes:
    """The pool's live tensors as planes of bytes.

    Args:
        pool: SGLang's KV pool (``allocator.get_kvcache()``).
        block_tokens: Tokens in a block; a multiple of the page.
        page_tokens: The tree's page; default: the pool's.

    Returns:
        Planes that share the pool's memory, for slots 0 to ``pool.size + pool.page_size - 1``.

    Raises:
        LayoutError: names the pool's type, what is missing, and what is supported.
    """
    _check_kind(pool)
    num_slots = int(pool.size) + int(pool.page_size)
    kinds = _buffers(pool)
    num_layers = _equal_lengths(pool, kinds)
    tensors = [(layer, kind, kinds[kind][layer]) for layer in range(num_layers) for kind in kinds]
    views = [_plane(pool, tensor, num_slots) for _, _, tensor in tensors]
    _check_layers(pool, kinds, views)
    planes = tuple(
        Plane(layer, kind, view.shape[1]) for (layer, kind, _), view in zip(tensors, views, strict=True)
    )
    layout = BlockLayout(
        block_tokens,
        int(pool.page_size if page_tokens is None else page_tokens),
        (PartLayout("kv", dtype_name(pool.dtype), planes),),
    )
    _check_sum(pool, tensors)
    return DevicePlanes(layout, tuple(views), num_slots)


def check_allocator(allocator: Any) -> None:
    """Refuse allocators whose slot numbers are not rows of one pool.

    Raises:
        LayoutError: names the allocator's type, or the two page sizes that differ.
    """
    name = type(allocator).__name__
    if name not in SUPPORTED_ALLOCATORS:
        raise LayoutError(
            f"SGLang's allocator {name} is not supported: its slots are not rows of one pool; "
            f"supported: {', '.join(SUPPORTED_ALLOCATORS)}"
        )
    pool_page = int(allocator.get_kvcache().page_size)
    if int(allocator.page_size) != pool_page:
        raise LayoutError(
            f"SGLang's allocator hands out pages of {allocator.page_size} tokens over a pool with pages of "
            f"{pool_page} (context parallel decoding), which is not supported"
        )


def is_replicated(pool: Any) -> bool:
    """Whether each tensor-parallel rank holds the same bytes (latent attention)."""
    return type(pool).__name__ == "MLATokenToKVPool"


def check_dtype(pool: Any, configured: str | None) -> None:
    """The configured KV element type must be the pool's.

    Raises:
        LayoutError: it is another; names both.
    """
    found = dtype_name(pool.dtype)
    if configured not in (None, found):
        raise LayoutError(
            f"kv_cache_dtype is {configured} in the configuration and {found} in SGLang's KV pool: "
            "leave it out, or start SGLang with the same --kv-cache-dtype"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _refusal(pool: Any, reason: str) -> LayoutError:
    return LayoutError(
        f"SGLang's KV pool {type(pool).__name__} is not supported: {reason}; "
        f"supported: {', '.join(SUPPORTED_POOLS)}, with token-major rows and equal layers"
    )


def _check_kind(pool: Any) -> None:
    name = type(pool).__name__
    if name not in SUPPORTED_POOLS:
        raise _refusal(pool, _MISSING.get(name, "what it keeps besides K and V, or how, is not known"))
    for attribute, reason in _FORBIDDEN:
        value = getattr(pool, attribute, None)
        if value is not None and value is not False:
            raise _refusal(pool, reason)
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise _refusal(pool, f"its tensors are laid out as {layout!r}, not token by token")


def _buffers(pool: Any) -> dict[str, Sequence[torch.Tensor]]:
    """Per kind of plane the pool's tensors, one a layer."""
    names = {"latent": "kv_buffer"} if is_replicated(pool) else {"k": "k_buffer", "v": "v_buffer"}
    found = {kind: getattr(pool, name, None) for kind, name in names.items()}
    for kind, tensors in found.items():
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise _refusal(pool, f"its {names[kind]} is {type(tensors).__name__}, not a list of layers")
    return found  # type: ignore[return-value]  # None was refused just above


def _equal_lengths(pool: Any, kinds: dict[str, Sequence[torch.Tensor]]) -> int:
    counts = {kind: len(tensors) for kind, tensors in kinds.items()}
    if set(counts.values()) != {int(pool.layer_num)}:
        raise _refusal(pool, f"it states {pool.layer_num} layers and has {counts}")
    return int(pool.layer_num)


def _plane(pool: Any, tensor: torch.Tensor, num_slots: int) -> torch.Tensor:
    """One layer's tensor ``[slots, ...]`` as ``uint8 [num_slots, row_bytes]``, sharing its memory."""
    if tensor.dim() < 2 or tensor.shape[0] < num_slots:
        raise _refusal(pool, f"a tensor of shape {tuple(tensor.shape)} does not hold {num_slots} slots")
    if tensor.dtype != pool.store_dtype:
        raise _refusal(pool, f"a tensor is {tensor.dtype}, the pool states {pool.store_dtype}")
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            raise _refusal(pool, f"a token's row has gaps (strides {tensor.stride()})")
        expected *= size
    rows = tensor.as_strided((num_slots, expected), (tensor.stride(0), 1), tensor.storage_offset())
    view = rows.view(torch.uint8)
    if view.data_ptr() != tensor.data_ptr():
        raise AssertionError("a view of the pool does not share its memory")
    return view


def _check_layers(pool: Any, kinds: dict[str, Sequence[torch.Tensor]], views: list[torch.Tensor]) -> None:
    """Layers must be alike: a hybrid model's are not."""
    each = len(kinds)
    for start in range(0, len(views), each):
        sizes = [view.shape[1] for view in views[start : start + each]]
        if sizes != [view.shape[1] for view in views[:each]]:
            raise _refusal(pool, f"layer {start // each} has rows of {sizes} B, the first layer others")


def _check_sum(pool: Any, tensors: list[tuple[int, str, torch.Tensor]]) -> None:
    """What was found must be all that the pool says it holds."""
    stated = pool.get_kv_size_bytes()
    stated = sum(stated) if isinstance(stated, (tuple, list)) else stated
    found = sum(tensor.numel() * tensor.element_size() for _, _, tensor in tensors)
    if found != int(stated):
        raise _refusal(pool, f"it states {int(stated)} B of KV, its layers' tensors have {found} B")
