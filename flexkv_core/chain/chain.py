"""TierChain: the tiers in order, with each one's policy.  Lookup, load, store, prefetch, poll, close.

The chain is deciding and bookkeeping; workers and the transfer do.  Everything that fails below
becomes a recompute here, counted by cause, and never an exception in the engine.

Threads: one owner.  Every method is called by the engine's thread (or by whoever holds the manager's
place); none waits for I/O or the device, apart from ``warm_up``, ``wait_for_message``, ``drain`` and
``close``, which say so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..drivers import Observers
from ..errors import ConfigError
from ..index import BlockIndex
from ..index.policy import eviction_order
from ..keys import BlockChain
from ..layout import BlockLayout
from ..metrics import Metrics
from ..models import ChainConfig
from ..tier import DirectTier, Tier
from ..transfer import Fence, Transfer
from ..wrappers import wrap
from .calls import Completed, Completions, Faltered, Message, Notice, Returned
from .capacity import Capacity
from .cascade import Cascade, CascadeBatch
from .choice import Choice
from .executor import TierWorkers, run_bounded
from .fill_batch import FillBatch
from .fills import Fills
from .fitting import capacity_blocks, check_links, check_values, lane_threads
from .host import HostSlots
from .jobs import LoadJob, StoreJob
from .links import Link
from .loads import Loads
from .lookup import Lookup, Lookups
from .parts import ChainParts
from .probes import Probe, Probes
from .receipts import Receipt
from .stores import Stores
from .warm_up import Clock, take_over
from .weighing import Weighing

logger = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 0.01
_TELL_EVERY_S = 10.0
_CLOSE_AT_LEAST_S = 0.5
"""What a tier gets for its ``close`` however late it is."""
_OWNERS = (FillBatch, CascadeBatch, Probe)


class TierChain:
    """An open chain.  Made by ``opening.open_chain``."""

    def __init__(
        self,
        *,
        config: ChainConfig,
        layout: BlockLayout,
        tiers: Sequence[Tier],
        transfer: Transfer,
        metrics: Metrics | None = None,
        observers: Observers | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        on_receipt: Callable[[Receipt], None] = lambda _receipt: None,
    ) -> None:
        """Put opened tiers to work.  The chain closes them, unless this raises: then they are the caller's.

        Raises:
            ConfigError: the tiers' capabilities do not allow this chain, with every reason.
            HostMemoryError: the staging pool does not fit, or cannot be pinned.
        """
        findings = check_links(config.tiers, [tier.capabilities for tier in tiers])
        findings += check_values(config.tiers, tiers, layout)
        if findings:
            raise ConfigError("chain", findings)
        self.config = config
        self.layout = layout
        self.metrics = metrics or Metrics()
        self.observers = observers or Observers()
        self._transfer = transfer
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_receipt = on_receipt
        self._completions = Completions()
        self._last_expire = clock()
        self._last_fault = float("-inf")
        self._is_closed = False
        first = tiers[0] if isinstance(tiers[0], DirectTier) else None
        self.host = HostSlots(first, config.staging, layout.slot_bytes)
        self.links = [self._link(i, tier) for i, tier in enumerate(tiers)]
        self.index = BlockIndex(
            layout.block_tokens, [eviction_order(link.config.eviction) for link in self.links]
        )
        self._parts = ChainParts(
            layout=layout,
            links=self.links,
            index=self.index,
            host=self.host,
            capacity=Capacity(self.index, self.host, self.metrics, self.observers),
            transfer=transfer,
            metrics=self.metrics,
            observers=self.observers,
            on_end=self._ended,
        )
        self.cascade = Cascade(self._parts)
        self.weighing = Weighing(self._parts, config.engine)
        self._lookups = Lookups(self._parts, self.weighing, config.engine.min_hit_tokens)
        self._probes = Probes(self._parts)
        self.fills = Fills(self._parts, config.engine.prefetch_host_share)
        self.weighing.is_on_its_way = self.fills.is_on_its_way
        self.loads = Loads(self._parts, self.fills)
        self.stores = Stores(self._parts, self.cascade, config.engine.max_store_tokens)
        self.fills.on_promoted = self.cascade.promoted
        self.cascade.tick(clock())
        try:
            self._put_to_work()
        except BaseException:
            for link in self.links:
                link.workers.close()
            for link in self.links:
                link.workers.join(time.monotonic() + _CLOSE_AT_LEAST_S)
            self.host.close()
            raise

    def _put_to_work(self) -> None:
        """Last of all: a chain that cannot be made must leave no thread behind."""
        self._transfer.register(self.host.region)
        for link in self.links:
            link.raw.register(self.host.region)
        for link in self.links:
            link.workers.start()

    def _link(self, number: int, tier: Tier) -> Link:
        config, can = self.config.tiers[number], tier.capabilities

        def changed(state: str, reason: str) -> None:
            self._completions.put(Notice(lambda: self._state_changed(config.name, state, reason)))

        threads = lane_threads(config, can)
        wrapped = wrap(
            tier,
            config,
            self.layout,
            self.metrics,
            changed,
            self._clock,
            num_calls=threads.load + threads.store,
            num_threads=sum(threads),
        )
        return Link(
            number=number,
            config=config,
            raw=tier,
            wrapped=wrapped,
            workers=TierWorkers(
                config.name,
                wrapped.tier,
                load_threads=threads.load,
                store_threads=threads.store,
                lookup_threads=threads.lookup,
                completions=self._completions,
                clock=self._clock,
            ),
            capabilities=can,
            capacity_blocks=capacity_blocks(can, self.layout, config.codec),
            keeps_tails=config.store_tails if config.store_tails is not None else not can.shared,
        )

    # ---- questions -----------------------------------------------------------------------------

    @property
    def num_under_way(self) -> int:
        """Loads, stores and calls that are not over; 0 means that nothing touches any slot."""
        jobs = self.loads.num_active + self.stores.num_active
        blocks = self.fills.num_open + self.cascade.num_waiting
        return jobs + blocks + sum(link.workers.num_open for link in self.links)

    def lookup(
        self,
        chain: BlockChain,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        is_promised: bool = False,
    ) -> Lookup:
        """How long a prefix of ``chain`` can be restored.  A pure query: calling it changes nothing.

        Args:
            chain: The prompt, under its namespace.
            start: Tokens that the engine has already.
            max_tokens: Longest prefix that is of use; default: all.
            is_promised: The engine counts on it already: whether it is worth loading is not weighed.

        Raises:
            ValueError: ``start`` is negative, or the blocks are of another size.
        """
        if start < 0:
            raise ValueError(f"start is {start}")
        if self._is_closed:
            return Lookup(start, None, why="closed")
        if chain.num_tokens <= start:
            return Lookup(start, None, why="all")
        limit = chain.num_tokens if max_tokens is None else min(max_tokens, chain.num_tokens)
        return self._lookups.find(chain, start, limit, self._clock(), is_promised=is_promised)

    @property
    def host_capacity_blocks(self) -> int:
        """Blocks that the host slots hold."""
        return self._parts.host_capacity_blocks

    def faults(self) -> list[str]:
        """What keeps the chain from being whole, a line for each; [] is good."""
        if self._is_closed:
            return ["the chain is closed"]
        return [f"tier {link.name} {link.fault}" for link in self.links if link.fault]

    @property
    def num_probes(self) -> int:
        """Questions to shared tiers that are not answered yet."""
        return self._probes.num_open

    # ---- work ----------------------------------------------------------------------------------

    def load(
        self,
        chain: BlockChain,
        lookup: Lookup,
        *,
        start: int,
        label: str = "",
        deadline_s: float | None = None,
    ) -> LoadJob | None:
        """Begin to bring what ``lookup`` found, from token ``start`` on, into host slots.

        See ``Loads.begin``; follow with ``bind``.
        """
        return self._begin(chain, lookup, start, label, deadline_s, is_prefetch=False)

    def prefetch(self, chain: BlockChain, lookup: Lookup, *, start: int, label: str = "") -> LoadJob | None:
        """Bring what lies in lower tiers into host slots, ahead of its load."""
        if self.host.direct is None:
            return None
        return self._begin(chain, lookup, start, label, None, is_prefetch=True)

    def _begin(
        self,
        chain: BlockChain,
        lookup: Lookup,
        start: int,
        label: str,
        deadline_s: float | None,
        *,
        is_prefetch: bool,
    ) -> LoadJob | None:
        now = self._clock()
        self.cascade.tick(now)
        if deadline_s is None:
            deadline_s = self.config.engine.load_deadline_s
        if lookup.match is None or self._is_closed:
            return None
        return self.loads.begin(
            chain,
            start,
            lookup.match,
            label=label,
            now=now,
            deadline=now + deadline_s,
            is_prefetch=is_prefetch,
            choice=lookup.choice,
        )

    def bind(self, job: LoadJob, device_slots: Any, fence: Fence, *, layerwise: bool = False) -> None:
        """Give a load its device slots, one for each of its tokens; first layers first if ``layerwise``."""
        self.loads.bind(job, device_slots, fence, self._clock(), layerwise=layerwise)

    def cancel(self, job: LoadJob | StoreJob) -> None:
        """Give a load or store up; it is over when ``is_over`` says so."""
        if isinstance(job, LoadJob):
            self.loads.cancel(job, self._clock())
        else:
            self.stores.cancel(job, self._clock())

    def store(
        self, chain: BlockChain, num_tokens: int, *, with_tail: bool = True, label: str = ""
    ) -> StoreJob | None:
        """Plan a store of the first ``num_tokens`` tokens; None where there is nothing to do."""
        now = self._clock()
        self.cascade.tick(now)
        if self._is_closed:
            return None
        return self.stores.begin(
            chain,
            num_tokens,
            page_tokens=self.layout.page_tokens,
            with_tail=with_tail,
            label=label,
            now=now,
        )

    def launch(self, job: StoreJob, device_slots: Any, fence: Fence) -> None:
        """Start a planned store: one device slot for each token of ``job.plan``."""
        self.stores.launch(job, device_slots, fence, self._clock())

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of prompts in one pass, in so long."""
        self.weighing.prefill.observe(num_tokens, seconds, self._clock())

    def not_loaded(self, choice: Choice, label: str) -> None:
        """A request is computed since that is sooner: its receipt, and its count."""
        self._ended(Receipt("load", label, "recompute", 0, 0, 0, choice=choice))

    def probe(self, chain: BlockChain, first_block: int) -> int:
        """Ask the shared tiers which blocks from ``first_block`` on they have.

        Returns:
            How many calls were queued; ``num_probes`` says when they are answered.
        """
        return self._probes.ask(chain.keys()[first_block:], self._clock())

    def poll(self) -> None:
        """Take in what workers and the transfer have finished.  Costs next to nothing when idle."""
        if self.loads.num_active or self.stores.num_active or not self._completions.is_empty():
            self._take_in(self._completions.drain())
        else:
            self._expire(self._clock())  # calls that no job waits for have deadlines, too

    def wait_for_message(self, timeout_s: float) -> None:
        """Block until something has ended below, at most ``timeout_s``, and take it in."""
        self._take_in(self._completions.wait(timeout_s))

    def _take_in(self, messages: list[Message]) -> None:
        now = self._clock()
        self.cascade.tick(now)
        for message in messages:
            try:
                self._handle(message, now)
            except Exception as exc:  # noqa: BLE001 - those behind it hold slots and pins, which must come back
                self._fault(exc, now)
        self.loads.advance(now)
        self.stores.advance(now)
        self._expire(now)

    def _expire(self, now: float) -> None:
        if now - self._last_expire >= _EXPIRE_EVERY_S:
            self._last_expire = now
            for link in self.links:
                link.workers.expire(now)

    def _fault(self, exc: Exception, now: float) -> None:
        """A message could not be taken in, which is a fault of the core: counted, and told now and then."""
        self.metrics.count("core_faults")
        if now - self._last_fault >= _TELL_EVERY_S:
            self._last_fault = now
            logger.error("[FlexKV] the end of a call could not be taken in", exc_info=exc)

    def _handle(self, message: Message, now: float) -> None:
        if isinstance(message, Notice):
            message.run()
            return
        owner = message.call.owner
        if isinstance(message, Faltered):
            if isinstance(owner, FillBatch):
                self.fills.faltered(message, owner, now)
            return
        link = owner if isinstance(owner, Link) else owner.link if isinstance(owner, _OWNERS) else None
        if link is not None:
            self._parts.capacity.retry_strays(link, message, now)
        if isinstance(message, Completed):
            if isinstance(owner, FillBatch):
                self.fills.filled(message, owner, now)
            elif isinstance(owner, CascadeBatch):
                self.cascade.stored(message, owner, now)
            elif isinstance(owner, Probe):
                self._probes.answered(message, owner, now)
            elif link is not None and message.is_adrift:
                link.note_late(message)  # a removal; if it was the breaker's probe, another may follow
        elif isinstance(message, Returned):
            if isinstance(owner, FillBatch):
                self.fills.returned(owner)
            elif isinstance(owner, CascadeBatch):
                self.cascade.returned(owner, now)

    def _ended(self, receipt: Receipt) -> None:
        self.metrics.count("jobs", kind=receipt.kind, status=receipt.status)
        self.metrics.count("tokens", receipt.num_tokens, kind=receipt.kind)
        self.metrics.count("bytes", receipt.num_bytes, kind=receipt.kind)
        for tier, tokens in receipt.tokens_by_tier.items():
            if receipt.num_tokens:
                self.metrics.count("loaded_tokens", tokens, tier=tier)
        try:
            self._on_receipt(receipt)
        except Exception:  # noqa: BLE001 - what listens must not keep a job from letting go of its slots
            logger.exception("[FlexKV] a receipt could not be handed over")

    def _state_changed(self, tier: str, state: str, reason: str) -> None:
        level = logging.INFO if state == "up" else logging.WARNING
        logger.log(level, "[FlexKV] tier %s is %s%s", tier, state, f": {reason}" if reason else "")
        self.metrics.count("tier_state_changes", tier=tier, state=state)
        self.observers.state_changed(tier, state, reason)

    # ---- start and end -------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Take over what persistent tiers of this process hold.  Blocks for their listing."""
        take_over(self._parts, self._clock, self._wall_clock)

    def forget_all(self) -> None:
        """Drop every block of every tier that this process fills, except those that are in use.

        What is in use stays until its job ends; keys of a new namespace never reach it.
        """
        now = self._clock()
        for link in self.links:
            link.known.clear()
            if not link.is_indexed or link.config.read_only:
                continue
            gone = self._parts.capacity.evict(link, self.index.count(link.number), is_final=True)
            if link.direct is None or link.number:
                link.evict(gone, now)

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is under way.  Blocks, at most ``deadline_s``; False on expiry."""
        end = time.monotonic() + deadline_s
        while True:
            self._take_in(self._completions.drain())
            if not self.num_under_way and self._completions.is_empty():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.wait_for_message(min(0.002, left))

    def close(self) -> None:
        """End what is queued, wait for copies that run, close transfer, then tiers.  May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        now = self._clock()
        self.loads.cancel_all(now)
        self.stores.cancel_all(now)
        for link in self.links:
            link.workers.close()
            if link.wrapped.limit is not None:
                link.wrapped.limit.interrupt()
        end = time.monotonic() + self.config.engine.shutdown_deadline_s
        if not self.drain(self.config.engine.shutdown_deadline_s):
            logger.warning("[FlexKV] %d jobs were still under way at the end", self.num_under_way)
        try:
            self._transfer.close()
        except Exception:  # noqa: BLE001 - foreign code; the tiers must be closed all the same
            logger.exception("[FlexKV] the transfer failed to close")
        self._take_in(self._completions.drain())
        stuck = [name for link in self.links for name in link.workers.join(end)]
        if stuck:
            logger.warning("[FlexKV] threads that hang in a driver: %s", ", ".join(stuck))
        self._take_in(self._completions.drain())
        if self.index.num_pins:
            logger.warning("[FlexKV] %d pins were never given back", self.index.num_pins)
        for link in reversed(self.links):
            left_s = max(_CLOSE_AT_LEAST_S, end - time.monotonic())
            if not run_bounded(f"flexkv-{link.name}-close", link.wrapped.tier.close, left_s):
                logger.warning("[FlexKV] tier %s has not closed in %.1f s", link.name, left_s)
        self.host.close()
