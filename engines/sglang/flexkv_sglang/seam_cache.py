"""SeamRadixCache: SGLang's radix cache with one set of entry points for all versions.

Each version of the scheduler calls other methods with other arguments; this class maps all of them
onto the ``on_...`` methods, which a subclass overrides and which mean the same everywhere.

All of them run on the scheduler's thread, inside SGLang's call, and must not wait for I/O or the
device longer than configured.  In SGLang's loop the order is: tick, match and load back of waiting
requests, launch of the next forward pass, checkpoint and end of requests of the *previous* pass.

A ``_seam`` method is this module's own.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from . import compat
from .compat import RequestHandle
from .handover import Asking, Checkpoint, Loaded, Prompt, RetryLater, Verdict

logger = logging.getLogger(__name__)


class SeamRadixCache(compat.types().RadixCache):  # type: ignore[misc]  # sglang has no types
    """See the module.  A subclass overrides ``on_...``; nothing else of SGLang's need be known to it."""

    def __init__(self, ctx: Any) -> None:
        """Build the tree from SGLang's ``TreeCacheBuildContext``."""
        self.seam = compat.seam()
        self._seam_is_open = False
        self._seam_is_shut = False
        self._seam_handles: dict[tuple[str, int], set[RequestHandle]] = {}
        self.asking: Asking | None = None
        super().__init__(ctx.params)
        self._seam_is_open = True

    # --- what a subclass overrides --------------------------------------------------------------

    @abstractmethod
    def on_match(self, handle: RequestHandle, prompt: Prompt, have: int) -> int:
        """How many tokens after ``have`` the tiers hold.

        Called many times per waiting request (LPM ranks the queue in each pass), so it is a pure query:
        cheap, nothing to be released (HS-32, HS-33).  Never called for SGLang's own probes, for media,
        or where the device has everything.

        Returns:
            A number of tokens from 0; cut to whole pages and to the prompt by the caller.
        """

    @property
    def others_run(self) -> bool:
        """Whether the scheduler has other work than the request that it asks about."""
        return self.asking is not None and self.asking.others_run

    def has_room(self, req: Any) -> bool:
        """Whether the request that the scheduler asks about could be computed beside all slots held now."""
        return self.asking is None or self.asking.has_room(req)

    @abstractmethod
    def on_load_back(
        self, handle: RequestHandle, req: Any, node: Any, have: int, count: int, *, may_wait: bool
    ) -> Loaded | Verdict:
        """Bring the promised tokens: all, or RECOMPUTE, or ASK_AGAIN.

        Called at admission, in the same pass as the match that promised (after ASK_AGAIN: again in a
        later pass, after another match, which may promise more or less).  ``node``, the last device node
        of the match, is locked during the call and no longer; lock it for a load that outlives it.
        After ASK_AGAIN the scheduler goes on with the requests behind, up to a number (``admission``).

        Args:
            handle: The attempt.
            req: SGLang's request, for ``compat.report_storage_tokens`` only.
            node: Where the load hangs below.
            have: Tokens on the device, whole pages.
            count: Promised tokens, whole pages.
            may_wait: Whether ASK_AGAIN may be answered.
        """

    def tokens_held_for(self, handle: RequestHandle) -> int:  # noqa: ARG002 - a subclass looks
        """Device slots that a load under way holds for this request, outside the tree."""
        return 0

    def holds_slots(self) -> bool:
        """Whether device slots are held, or locked in the tree, that come back without a request's end."""
        return False

    @abstractmethod
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """The tree has taken over a request's KV, which may now be stored.

        Called after each prefill chunk, after the prefill, and at the end unless the request's KV is
        discarded (retraction, refused output).  The last token's KV may still be written by a launched
        forward pass: copy after a fence on ``compat.forward_stream`` (HS-1).
        """

    def on_end(self, handle: RequestHandle) -> None:
        """An attempt gave its row back: finished, retracted, or aborted while it ran."""

    def on_abort(self, handle: RequestHandle) -> None:
        """A request left the queue without having run.

        Not before 0.5.20 (``seam.reports_aborts``): there, let a load that is under way end by itself
        and put it into the tree, whoever asked for it.
        """

    def on_evict(self, num_tokens: int) -> None:
        """Before the tree gives up slots.  No communication here (HS-23), and no waiting but for stores."""

    def deciding(self, num_running: int) -> AbstractContextManager[None]:  # noqa: ARG002 - nothing waits here
        """Round SGLang's question whether so many requests have the slots to go on."""
        return nullcontext()

    def on_tick(self) -> None:
        """Top of each scheduling pass, also when idle: thousands of times a second."""

    times_prefill = False
    """Whether ``on_pass_begins`` and ``on_pass_ends`` are wanted."""

    def on_pass_begins(self, num_tokens: int) -> None:
        """Before a forward pass that computes so many tokens of prompts; 0: it only decodes."""

    def on_pass_ends(self) -> None:
        """After the results of the oldest pass were taken in."""

    def on_batch_end(self) -> None:
        """After the results of a batch.  Not before 0.5.21."""

    def on_pass_reads(self, batch: Any) -> None:
        """Before a forward pass of these requests is launched."""

    def on_pass_launched(self, scheduler: Any, batch: Any) -> None:
        """After a forward pass was launched, before anybody looks at its results."""

    def may_flush(self) -> bool:
        """Drain copies before a flush; False refuses it, and ``/flush_cache`` says so (HS-51)."""
        return True

    def on_reset(self) -> None:
        """Before the tree and the allocator forget everything: after this no copy may touch a slot.

        It cannot be refused here, only in ``may_flush``, which comes before it.  Tiers keep their blocks.
        """

    def on_weights_changed(self, reason: str) -> None:
        """Weights are about to change, or may have: blocks of all tiers are invalid, running copies included.

        SGLang usually resets the tree afterwards, but need not (``flush_cache: false``): until the next
        ``on_reset`` what is on the device may be of either weights, so neither store it nor match.
        """

    def on_weights_settled(self, call: str, flush: Callable[[], bool], *, is_ok: bool) -> None:
        """The call that ``on_weights_changed`` has announced is over.

        Args:
            call: Its name.
            flush: Empties the device by SGLang's own means; False while requests run.  Good for later, too.
            is_ok: Whether SGLang says that it succeeded.
        """

    def on_adapter_loaded(self, lora_id: str) -> None:
        """A LoRA adapter was loaded; SGLang may load another content under an id that it had before."""

    def on_sleep(self) -> None:
        """The device's KV memory is about to be unmapped: no copy may touch it until further notice."""

    def on_shutdown(self) -> None:
        """The scheduler ends.  Called once."""

    def extra_protected_tokens(self) -> int:
        """Slots that we hold outside the tree (loads under way, quarantine); SGLang's books need them."""
        return 0

    # --- SGLang's calls: match and load ---------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """SGLang's query, answered with what the tiers hold beyond the device."""
        base = super().match_prefix(params)
        req = params.req
        if self.disable or req is None or not compat.is_cacheable(req):
            return base
        key = params.key.page_aligned(self.page_size)
        have = compat.match_device_len(base)
        if len(key) <= have:
            return base
        handle = self._seam_handle(req)
        hit = self.on_match(handle, Prompt(key, compat.request_namespace(req)), have)
        hit = min(hit, len(key) - have) // self.page_size * self.page_size
        return compat.match_with_host_hit(base, hit) if hit > 0 else base

    def init_load_back(self, params: Any) -> Any:
        """SGLang's call at admission."""
        req, node, count = params.req, params.best_match_node, params.host_hit_length
        have = len(req.prefix_indices) if not self.seam.match_gives_length else req.prefix_len
        asking = self.asking
        if asking is not None:
            asking.settle()
        may_wait = asking is None or asking.may_wait
        outcome = self.on_load_back(self._seam_handle(req), req, node, have, count, may_wait=may_wait)
        if outcome is Verdict.ASK_AGAIN:
            if asking is not None:
                asking.waits = True
            if self.seam.load_may_defer:
                return None
            raise RetryLater
        if isinstance(outcome, Verdict):
            return self._seam_nothing_loaded(req, node)
        if len(outcome.slots) != count:  # the tree has what was loaded; SGLang takes all or nothing
            logger.error("[FlexKV] %r: loaded %d of %d promised tokens", req.rid, len(outcome.slots), count)
            return self._seam_nothing_loaded(req, node)
        return (count if self.seam.load_gives_count else outcome.slots), outcome.node

    def _seam_nothing_loaded(self, req: Any, node: Any) -> Any:
        asking = self.asking
        if not self.seam.load_is_all_or_none:
            if asking is not None and not asking.has_room(req):  # those versions do not look again
                asking.waits = True
                raise RetryLater
            req.host_hit_length = 0  # those versions report the promise as cached, not the load (HS-66)
        if self.seam.load_gives_count:
            return 0, node
        return torch.empty(0, dtype=torch.int64, device=self.device), node

    # --- SGLang's calls: KV handed over ---------------------------------------------------------

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """From 0.5.22: chunks, and the end of a request."""
        super().checkpoint(req, up_to=up_to, **kwargs)
        self._seam_from_row(req, req.full_untruncated_fill_ids, is_finished=req.finished())

    def cache_unfinished_req(self, req: Any, *args: Any, **kwargs: Any) -> None:
        """To 0.5.21: chunks."""
        super().cache_unfinished_req(req, *args, **kwargs)
        self._seam_from_row(req, req.full_untruncated_fill_ids, is_finished=False)

    def insert_req(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """0.5.21: the end of a request; its release follows."""
        super().insert_req(req, up_to=up_to, **kwargs)
        self._seam_from_tree(req, up_to)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """To 0.5.20: the end of a request, and its release."""
        super().cache_finished_req(req, is_insert, **kwargs)
        if is_insert and not self.disable_finished_insert:
            self._seam_from_tree(req, kwargs["kv_len_to_handle"])
        self._seam_end(req)

    def _seam_from_row(self, req: Any, tokens: Sequence[int], *, is_finished: bool) -> None:
        """The tree repointed the request's row to its own slots, up to the protected length."""
        if self.disable or not compat.is_cacheable(req):
            return
        row = self.req_to_token_pool.req_to_token[compat.request_row(req)]
        slots = row[: compat.protected_len(req)]
        if len(slots):
            self.on_checkpoint(Checkpoint(req, tokens, slots, req.last_node, is_finished=is_finished))

    def _seam_from_tree(self, req: Any, num_tokens: int) -> None:
        """The row still names slots that were doubles and are free now, so the tree is asked."""
        if self.disable or not compat.is_cacheable(req):
            return
        types = compat.types()
        tokens = (req.origin_input_ids + req.output_ids)[:num_tokens]
        salt = {"cache_salt": req.cache_salt} if self.seam.has_salt else {}
        key = types.RadixKey(tokens, req.extra_key, is_bigram=self.is_eagle, **salt)
        found = types.RadixCache.match_prefix(self, types.MatchPrefixParams(key=key))
        if len(found.device_indices):
            node = found.last_device_node
            self.on_checkpoint(Checkpoint(req, tokens, found.device_indices, node, is_finished=True))

    # --- SGLang's calls: ends -------------------------------------------------------------------

    def on_release(self, req: Any, **_: Any) -> None:
        """From 0.5.21: a row is given back."""
        self._seam_end(req)

    def release_aborted_request(self, handle: Any) -> None:
        """A request left the queue; by id before 0.5.20, where only HiCache storage makes it happen."""
        if isinstance(handle, str):
            keys = [key for key in self._seam_handles if key[0] == handle]
        else:
            keys = [(handle.rid, handle.attempt_id)]
        for key in keys:  # requests of one id cannot be told apart here: what is kept for them goes
            for known in self._seam_handles.pop(key, ()):
                self.on_abort(known)

    def _seam_handle(self, req: Any) -> RequestHandle:
        handle = compat.request_handle(req)
        if self.seam.reports_aborts:
            self._seam_handles.setdefault((handle.rid, handle.attempt), set()).add(handle)
        return handle

    def _seam_end(self, req: Any) -> None:
        handle = compat.request_handle(req)
        known = self._seam_handles.get((handle.rid, handle.attempt))
        if known is not None:
            known.discard(handle)
            if not known:
                del self._seam_handles[(handle.rid, handle.attempt)]
        self.on_end(handle)

    # --- SGLang's calls: the rest ---------------------------------------------------------------

    def evict(self, params: Any) -> Any:
        """Make room on the device."""
        if not self.disable:
            self.on_evict(params.num_tokens)
        return super().evict(params)

    def protected_size(self) -> int:
        """Tokens that cannot be evicted now, ours included."""
        return int(super().protected_size()) + self.extra_protected_tokens()

    def check_hicache_events(self) -> None:
        """The tick."""
        self.on_tick()

    def flush_pending_backups(self) -> None:
        """The end of a batch."""
        self.on_batch_end()

    def reset(self) -> None:
        """Flush, and part of the construction."""
        if self._seam_is_open:
            self.on_reset()
        super().reset()

    def release_host_resources(self) -> None:
        """The scheduler's end."""
        if not self._seam_is_shut:
            self._seam_is_shut = True
            self.on_shutdown()

    shutdown = release_host_resources
