"""KVManager: all that an engine sees; the task API over a TierChain.

A task is a load (``get_match``), a store (``put_match``) or a prefetch.  Its end is delivered once, by the
``wait`` or ``try_wait`` that returns it.  ``cancel`` gives everything back in every phase.  ``lookup`` is the
pure query in front of it all: it makes no task.

Threads: one owner, the engine's scheduler thread.  ``start``, ``wait``, ``drain`` and ``shutdown`` block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..chain import TierChain
from ..chain.jobs import LoadJob, LoadState, StoreJob
from ..chain.lookup import Lookup
from ..chain.receipts import Receipt
from ..drivers import Observers
from ..keys import BlockChain, Namespace
from ..layout import BlockLayout
from ..metrics import Metrics
from ..models import ChainConfig
from ..sync import LocalSync, Sync
from ..transfer import Fence, Ticket, Transfer
from .masks import leading_false, leading_true, mask_of
from .opening import open_chain
from .sequences import NO_SCOPE, Scope, Sequences, Tokens
from .tasks import NO_TASK, KVResponse, KVResponseStatus, Progress, Tasks

if TYPE_CHECKING:
    from .masks import Mask

logger = logging.getLogger(__name__)

__all__ = ["NO_TASK", "KVManager", "KVResponse", "KVResponseStatus", "Progress", "Scope", "Tokens"]


class KVManager:
    """One engine's cache: start, match, launch, wait, shut down."""

    def __init__(
        self,
        config: ChainConfig,
        *,
        layout: BlockLayout,
        namespace: Namespace,
        transfer: Transfer,
        sync: Sync | None = None,
        observers: Observers | None = None,
        metrics: Metrics | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
        source: str = "chain",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember what to open; ``start`` opens it.

        Args:
            config: The chain.
            layout: What a block's bytes mean on this engine.
            namespace: Identity of the bytes; layout and block size are filled in from ``layout``.
            transfer: Copies to and from the engine's device memory; closed by ``shutdown``.
            sync: How ranks agree; default: one rank.
            observers: Plug-ins that are told of blocks; default: the installed ones.
            metrics: Where to count; default: its own.
            on_receipt: Told of every finished load, store and prefetch.
            source: Where ``config`` came from, for messages.
            clock: Monotonic seconds, by which tasks that nobody waits for are given up.
        """
        self.config = config
        self.layout = layout
        self.metrics = metrics or Metrics()
        self.sync = sync or LocalSync()
        self._transfer = transfer
        self._observers = observers
        self._on_receipt = on_receipt or (lambda _receipt: None)
        self._source = source
        self._sequences = Sequences(namespace, layout)
        self._chain: TierChain | None = None
        self._tasks = Tasks(clock)

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the chain.  Blocks.  Raises what ``open_chain`` raises."""
        if self._chain is None:
            self._chain = open_chain(
                self.config,
                self.layout,
                self.namespace,
                self._transfer,
                source=self._source,
                observers=self._observers,
                metrics=self.metrics,
                on_receipt=self._on_receipt,
            )

    def is_ready(self) -> bool:
        """Whether every tier is open and usable now: ``not faults()``.

        A tier that is down makes this False, although the others go on serving; it comes back by itself.
        """
        return not self.faults()

    def faults(self) -> list[str]:
        """What keeps this from being ready, a line for each tier; [] is good."""
        if self._chain is None:
            return ["it is not started"]
        return self._chain.faults()

    @property
    def chain(self) -> TierChain:
        """The open chain.  Raises RuntimeError before ``start``."""
        if self._chain is None:
            raise RuntimeError("KVManager.start() has not been called")
        return self._chain

    @property
    def namespace(self) -> Namespace:
        """The identity of this engine's blocks now."""
        return self._sequences.namespace

    def reset(self) -> None:
        """Drop every block of every tier that this engine fills; open tasks go on to their end."""
        if self._tasks.num_open:
            logger.warning("[FlexKV] reset with %d open tasks", self._tasks.num_open)
        self.chain.forget_all()

    def invalidate(self, weights_version: str | None = None) -> None:
        """The weights changed: nothing stored so far may be served again.

        Takes effect at once, also with copies in flight: keys of the new namespace name other blocks.

        Args:
            weights_version: The new version, if the engine knows one that means the same everywhere;
                default: a random one, so that other instances' blocks do not match by accident.
        """
        version = self._sequences.change_weights(weights_version)
        self.metrics.count("invalidations")
        logger.info("[FlexKV] weights changed: all tiers invalidated, weights version %s", version)
        self.reset()

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is under way, at most ``deadline_s``; False on expiry.  Blocks."""
        return self.chain.drain(deadline_s)

    def shutdown(self) -> None:
        """Close transfer and tiers.  Blocks, bounded.  May be called twice."""
        if self._chain is not None:
            self._chain.close()
        else:  # it never came to a chain that would close it
            self._transfer.close()
        self.sync.close()

    # ---- sequences -----------------------------------------------------------------------------

    def sequence(self, tokens: Tokens, scope: Scope = NO_SCOPE) -> BlockChain:
        """Token ids under a request's scope; keep it to look the same prompt up again cheaply.

        It stays good when the weights change.  Every call that takes it must be given the same ``scope``.

        Raises:
            ValueError: ``tokens`` are no token ids, or a sequence that was made under another scope.
        """
        return self._sequences.of(tokens, scope)

    def may_share(self, scope: Scope) -> bool:
        """Whether the configuration lets this request be stored and served at all."""
        return bool(scope.cache_salt) or not self.config.namespace.require_salt

    # ---- matching and moving -------------------------------------------------------------------

    def lookup(
        self, tokens: Tokens, *, start: int = 0, max_tokens: int | None = None, scope: Scope = NO_SCOPE
    ) -> Lookup:
        """How much of a prompt could be restored.  Changes nothing, however often it is called."""
        if not self.may_share(scope):
            return Lookup(start, None, why="no_salt")
        return self.chain.lookup(self.sequence(tokens, scope), start=start, max_tokens=max_tokens)

    def ask_shared(self, tokens: Tokens, found: Lookup, wait_s: float, *, scope: Scope = NO_SCOPE) -> bool:
        """Ask the shared tiers for what ``found`` lacks, and wait a moment for their answer.

        Blocks, at most ``wait_s``; not at all while an earlier question is still unanswered, so that a
        tier that hangs holds the engine up once and not once a request.

        Returns:
            Whether the answers are there: look the prompt up again.
        """
        if not found.wants_probe or self.chain.num_probes:
            return False
        chain = self.sequence(tokens, scope)
        self.chain.probe(chain, found.num_tokens // self.layout.block_tokens)
        end = time.monotonic() + wait_s
        while self.chain.num_probes:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.chain.wait_for_message(left)
        return True

    def get_match(
        self,
        token_ids: Tokens,
        token_mask: Any = None,
        *,
        start: int | None = None,
        scope: Scope = NO_SCOPE,
        max_tokens: int | None = None,
        promised: Lookup | None = None,
        label: str = "",
    ) -> tuple[int, Mask]:
        """Plan a restore, pin what it needs, and begin to bring it into host slots.

        Args:
            token_ids: The prompt.
            token_mask: Bool per token; False at the front for what the engine has already.
            start: The same as a number of tokens, instead of a mask.
            scope: What separates the request from others.
            max_tokens: Longest prefix of use.
            promised: The lookup that the engine relies on: what it chose is not weighed again.
            label: The request, for receipts.

        Returns:
            ``(task_id, mask)``: the tokens that will be restored, one run behind the False ones.  With
            none, the task has ended already.
        """
        chain = self.sequence(token_ids, scope)
        if start is None:
            start = leading_false(token_mask, chain.num_tokens)
        found = (
            self.chain.lookup(chain, start=start, max_tokens=max_tokens, is_promised=promised is not None)
            if self.may_share(scope)
            else Lookup(start, None, why="no_salt")
        )
        if promised is not None:
            found = replace(found, choice=promised.choice)
        job = self.chain.load(chain, found, start=start, label=label)
        ranges = [(start, start + job.num_tokens)] if job is not None else []
        task = self._tasks.new(chain.num_tokens, job, ranges)
        return task.task_id, mask_of(chain.num_tokens, ranges)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Tell how long a prefill pass took, for tiers with ``load_or_recompute: auto``.

        Args:
            num_tokens: Tokens that were computed in it, of all its requests.
            seconds: From its start on the device (or the end of the pass before it) to its end.
        """
        if self._chain is not None:
            self._chain.note_prefill(num_tokens, seconds)

    def note_recompute(self, found: Lookup, label: str = "") -> None:
        """A request goes on without what ``found`` chose to leave: write its receipt, once a request."""
        if found.choice is not None and self._chain is not None:
            self._chain.not_loaded(found.choice, label)

    def put_match(
        self,
        token_ids: Tokens,
        token_mask: Any = None,
        *,
        scope: Scope = NO_SCOPE,
        with_tail: bool = True,
        label: str = "",
    ) -> tuple[int, Mask]:
        """Plan a store and take host slots for it.

        Args:
            token_ids: The sequence whose KV is final.
            token_mask: Bool per token; True, then False behind the last token to store.
            scope: What separates the request from others.
            with_tail: Whether a partly filled last block is worth keeping: the sequence ends here.
            label: The request, for receipts.

        Returns:
            ``(task_id, mask)``: the tokens whose KV is to be copied out.  With none, the task has ended.

        Raises:
            ValueError: the mask is not True, then False: a store begins at the first token.
        """
        chain = self.sequence(token_ids, scope)
        num_tokens = leading_true(token_mask, chain.num_tokens)
        job = (
            self.chain.store(chain, num_tokens, with_tail=with_tail, label=label)
            if self.may_share(scope)
            else None
        )
        ranges = job.plan.ranges() if job is not None else []
        task = self._tasks.new(chain.num_tokens, job, ranges)
        return task.task_id, mask_of(chain.num_tokens, ranges)

    def launch(
        self,
        task_ids: Sequence[int],
        slot_mappings: Sequence[Any],
        *,
        as_batch: bool = False,
        layerwise: bool = False,
        fence: Fence | None = None,
    ) -> list[int]:
        """Start copies: one device slot for each True token of the task's mask, in order.

        Args:
            task_ids: Tasks of ``get_match`` or ``put_match``.
            slot_mappings: Per task 1-D int64 slots (``array('q')`` or a CPU tensor).
            as_batch: Answer with one id for all.
            layerwise: Loads: the engine awaits layer after layer (``ticket``), so the first go first.
            fence: What must have ended on the device; default: all work queued so far.

        Returns:
            The ids to wait on.

        Raises:
            ValueError: an unknown or launched task, or a wrong number of slots.  Nothing was started.
        """
        if len(set(task_ids)) < len(task_ids):
            raise ValueError("a task is given twice")
        if len(slot_mappings) != len(task_ids):
            raise ValueError(f"{len(task_ids)} tasks, but slots for {len(slot_mappings)}")
        tasks = [self._tasks.launchable(i, slots) for i, slots in zip(task_ids, slot_mappings, strict=True)]
        behind = fence or self._transfer.fence()
        for task, slots in zip(tasks, slot_mappings, strict=True):
            task.is_launched = True
            if isinstance(task.job, LoadJob):
                self.chain.bind(task.job, slots, behind, layerwise=layerwise)
            elif isinstance(task.job, StoreJob):
                self.chain.launch(task.job, slots, behind)
        if not as_batch or len(tasks) < 2:
            return list(task_ids)
        return [self._tasks.new_batch(task_ids).task_id]

    def prefetch_async(
        self, token_ids: Tokens, *, start: int = 0, scope: Scope = NO_SCOPE, label: str = ""
    ) -> int:
        """Bring what lies in lower tiers into host slots, and ask shared tiers for more.

        It goes behind loads that are needed now, takes at most ``engine.prefetch_host_share`` of the host
        slots, and may be cancelled: what was not begun is not read then, and what has come stays.

        Args:
            token_ids: The prompt.
            start: Tokens that the engine has already: nothing is brought for them.
            scope: What separates the request from others.
            label: The request, for receipts.

        Returns:
            A task id, or -1 where there is nothing to do.
        """
        if not self.may_share(scope):
            return NO_TASK
        chain = self.sequence(token_ids, scope)
        found = self.chain.lookup(chain, start=start)
        if found.wants_probe:
            self.chain.probe(chain, found.num_tokens // self.layout.block_tokens)
        first = self.config.tiers[0].name
        if all(tier == first for tier in found.tokens_by_tier):
            return NO_TASK
        job = self.chain.prefetch(chain, found, start=start, label=label)
        if job is None:
            return NO_TASK
        task = self._tasks.new(chain.num_tokens, job, [(start, start + job.num_tokens)])
        task.is_launched = True
        return task.task_id

    def cancel(self, task_ids: Sequence[int]) -> None:
        """Give tasks up; what they hold comes back now, or when a running copy has ended.

        Ended and unknown tasks are ignored.
        """
        for task_id in task_ids:
            task = self._tasks.get(task_id)
            if task is None:
                continue
            self.cancel(task.children)
            if task.job is not None and not task.job.is_over:
                self.chain.cancel(task.job)

    def is_over(self, task_id: int) -> bool:
        """Whether nothing of the task touches any slot; True for unknown tasks.  Delivers nothing."""
        return self._tasks.is_over(task_id)

    def is_staged(self, task_id: int) -> bool:
        """Whether all blocks of a load lie in host slots, so that only the copy is missing."""
        task = self._tasks.get(task_id)
        return (
            task is not None
            and isinstance(task.job, LoadJob)
            and task.job.state in (LoadState.STAGED, LoadState.COPYING, LoadState.DONE)
        )

    def progress(self, task_id: int) -> Progress | None:
        """How far a load or prefetch is; None for others, and for unknown ones.  Delivers nothing.

        Also None a minute after its end, which is all that is kept of it then.
        """
        task = self._tasks.get(task_id)
        if task is None or not isinstance(task.job, LoadJob):
            return None
        return Progress(task.job.num_tokens, task.job.num_ready_tokens, task.job.is_over)

    def ticket(self, task_id: int) -> Ticket | None:
        """The device copy of a task, once it has begun."""
        task = self._tasks.get(task_id)
        return task.job.ticket if task is not None and task.job is not None else None

    def poll(self) -> None:
        """Take in what has ended below.  Cheap when nothing is under way."""
        if self._chain is None:
            return
        self._chain.poll()
        for task_id, job in self._tasks.take_abandoned():
            logger.warning("[FlexKV] task %d was never launched: given up", task_id)
            self.metrics.count("abandoned_tasks")
            self._chain.cancel(job)

    def try_wait(self, task_ids: Sequence[int]) -> dict[int, KVResponse]:
        """Those of the tasks that have ended, were never launched, or are unknown."""
        self.poll()
        answers = {}
        for task_id in task_ids:
            answer = self._tasks.answer(task_id)
            if answer is not None:
                answers[task_id] = answer
        return answers

    def wait(self, task_ids: Sequence[int], timeout: float = 20.0) -> dict[int, KVResponse]:
        """Block until the tasks have ended, at most ``timeout`` seconds.

        Returns:
            One entry for each id.  ``TIMEOUT`` leaves a task as it is: a later wait may succeed.
        """
        end = time.monotonic() + timeout
        answers: dict[int, KVResponse] = {}
        while True:
            left = [i for i in dict.fromkeys(task_ids) if i not in answers]
            answers.update(self.try_wait(left))
            left = [i for i in left if i not in answers]
            if not left:
                return answers
            remaining = end - time.monotonic()
            if remaining <= 0:
                return answers | {i: KVResponse(KVResponseStatus.TIMEOUT, i) for i in left}
            self.chain.wait_for_message(min(remaining, 0.001))
