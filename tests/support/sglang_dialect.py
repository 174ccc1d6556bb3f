"""What the scheduler model in ``sglang_world`` calls by another name in another SGLang.

Chosen by the seam's facts, as in the adapter.  Import it only where ``sglang`` can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

from flexkv_sglang import admission, compat
from flexkv_sglang.handover import RetryLater


def apart(req: Any) -> tuple[Any, ...]:
    """What separates a request's KV."""
    return req.extra_key, req.lora_id, getattr(req, "cache_salt", None)


def prefix_len(req: Any) -> int:
    """Tokens that a request need not compute."""
    return int(req.prefix_len if compat.seam().match_gives_length else len(req.prefix_indices))


def extend_end(req: Any) -> int:
    """Where a request's next pass ends."""
    return int(req.extend_end if compat.seam().match_gives_length else req.extend_range.end)


def holds_kv(req: Any) -> bool:
    """Whether a request has a row."""
    return bool(req.kv.holds_kv) if compat.seam().kv_record else req.kv is not None


def committed_len(req: Any) -> int:
    """Tokens of a request whose KV is there, once all queued passes have ended."""
    return int((req.kv if compat.seam().kv_record else req).kv_committed_len)


def discards_output(req: Any) -> bool:
    """Whether the next token of a request must not be seen; before 0.5.22 ``to_finish`` alone ends it."""
    return bool(getattr(req, "discard_output_reason", None))


def is_locked(req: Any) -> bool:
    """Whether a request holds a lock on its node."""
    return req.lock is not None if compat.seam().match_gives_length else holds_kv(req)


def cached_by_tier(req: Any) -> tuple[int, int, int]:
    """Tokens from device, host and storage, as SGLang's first pass of a request counts them."""
    have = prefix_len(req)
    if compat.seam().load_is_all_or_none:
        device, host, storage = schedule_batch.split_cached_prefix_by_tier(
            prefix_len=have,
            host_hit_len=req.materialized_host_hit_len(),
            storage_hit_len=req.storage_hit_length,
            storage_hit_start=req.storage_hit_start,
            host_hit_is_storage=req.host_hit_is_storage,
        )
        return device, host, storage
    storage = min(req.host_hit_length, req.storage_hit_length)
    return max(0, have - req.host_hit_length), req.host_hit_length - storage, storage


def admit(adder: PrefillAdder, req: Any, *, has_chunked: bool) -> Any:
    """Ask for a request's admission, with our hook round it."""
    return admission.admit(PrefillAdder.add_one_req, adder, req, has_chunked, None)


def is_full_for_good(adder: PrefillAdder) -> bool:
    """Whether after ``NO_TOKEN`` SGLang asks nobody before a request has ended."""
    return not compat.seam().match_gives_length or bool(adder.can_run_list or adder.running_batch.reqs)


def load_back(req: Any, tree: Any) -> tuple[int, Any] | None:
    """``init_load_back`` as the scheduler calls it: loaded tokens and their node, or None for "later"."""
    params = InitLoadBackParams(
        best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
    )
    try:
        answer = tree.init_load_back(params)
    except RetryLater:
        return None
    if answer is None:
        return None
    loaded, node = answer
    return (loaded if compat.seam().load_gives_count else len(loaded)), node


def checkpoint(req: Any, tree: Any) -> None:
    """A pass of a request that goes on is over."""
    if compat.seam().match_gives_length:
        common.checkpoint_kv_cache(req, tree)
    else:
        common.maybe_cache_unfinished_req(req, tree)


def release(req: Any, tree: Any, *, keep: bool) -> None:
    """A request gives its row back."""
    name = "checkpoint" if compat.seam().match_gives_length else "is_insert"
    common.release_kv_cache(req, tree, **{name: keep})


def leave_queue(req: Any, tree: Any) -> None:
    """A request is aborted that has no results yet; before 0.5.20 nobody tells the tree."""
    if compat.seam().reports_aborts:
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

        tree.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)


def match_queued(req: Any, tree: Any) -> None:
    """What ranking by longest prefix does with each waiting request."""
    if compat.seam().match_gives_length:
        common.match_kv_cache(req, tree, max_prefix_len=max(0, req.seqlen - 1))
    else:
        req.init_next_round_input(tree)


def alloc_for_extend(batch: Any) -> None:
    """Rows and slots of a prefill."""
    allocation.alloc_for_extend(batch)
    if not compat.seam().kv_record:
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            req.kv_committed_len = length


def alloc_for_decode(batch: Any) -> None:
    """A slot for each request's next token."""
    getattr(allocation, "alloc_for_decode_default", allocation.alloc_for_decode)(batch, 1)
    if not compat.seam().kv_record:
        for req in batch.reqs:
            req.kv_committed_len += 1


def free_pages(allocator: Any) -> list[int]:
    """The pages that nobody owns."""
    if hasattr(allocator, "staged_pages"):
        return [int(page) for page in allocator.get_all_free_pages()]
    lists = (allocator.free_pages, allocator.release_pages)
    return [int(page) for pages in lists if pages is not None for page in pages]


class _Kernel:
    """Stands where a Triton kernel is called as ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: Sequence[int]) -> Callable[..., None]:
        return self._function


def _slots(first: int, end: int, last: int, pages: Iterator[int], page_size: int) -> Iterator[int]:
    """Slots of tokens ``first`` to ``end``, behind the slot ``last``."""
    for at in range(first, end):
        last = next(pages, 0) * page_size if at % page_size == 0 else last + 1
        yield last


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free: torch.Tensor,
    out: torch.Tensor,
    _batch_size: int,
    page_size: int,
) -> None:
    pages = iter(free.tolist())
    rows = zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True)
    found = [slot for first, end, last in rows for slot in _slots(first, end, last, pages, page_size)]
    out.copy_(torch.tensor(found, dtype=out.dtype))


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free: torch.Tensor,
    out: torch.Tensor,
    batch_size: int,
    page_size: int,
) -> None:
    _alloc_extend(seq_lens - 1, seq_lens, last_loc, free, out, batch_size, page_size)


if not hasattr(paged, "alloc_decode_naive"):  # before 0.5.22 only kernels know how, and none runs on a CPU
    paged.alloc_extend_kernel = _Kernel(_alloc_extend)
    paged.alloc_decode_kernel = _Kernel(_alloc_decode)
