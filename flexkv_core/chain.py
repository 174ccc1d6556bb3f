"""TierChain: the tiers in order, with each one's policy.  Lookup, load, store, prefetch, poll, close.

The chain is deciding and bookkeeping; workers and the transfer do.  Everything that fails below
becomes a recompute here, counted by cause, and never an exception in the engine.

Threads: one owner.  Every method is called by the engine's thread (or by whoever holds the manager's
place); none waits for I/O or the device, apart from ``open``, ``drain`` and ``close``, which say so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError

from . import envelope
from .capacity import Capacity
from .cascade import Cascade, CascadeBatch
from .drivers import Observers, find_driver, open_tier
from .errors import ConfigError, FlexKVError
from .executor import Call, Completed, Completions, Message, Notice, Returned, TierWorkers, Verb, run_bounded
from .host import HostSlots
from .index import BlockIndex, Match, Run, Usable
from .keys import BlockChain, Namespace, block_key
from .layout import BlockLayout
from .links import Link, capacity_blocks, check_links
from .loads import FillBatch, LoadJob, Loads
from .metrics import Metrics
from .models import ChainConfig, TierConfig
from .parts import ChainParts
from .policy import eviction_order
from .receipts import Receipt
from .stores import StoreJob, Stores
from .tier import DirectTier, Status, StoredBlock, Tier, TierContext
from .transfer import Fence, Transfer
from .wrappers import wrap

logger = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 0.01
_CLOSE_AT_LEAST_S = 0.5
"""What a tier gets for its ``close`` however late it is."""
_NEVER = float("-inf")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prompt would get.

    Attributes:
        num_tokens: Length of the prefix that can be restored, from token 0.
        match: The blocks that make it up; None where nothing is worth loading.
        tokens_by_tier: Tokens behind ``start`` by tier.
        wants_probe: Whether a shared tier should be asked for more (see ``TierChain.prefetch``).
        why: Why not more, in a word: ``all``, ``miss``, ``tier_down``, ``host_slots``, ``recompute``,
            ``closed``.
    """

    num_tokens: int
    match: Match | None
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    wants_probe: bool = False
    why: str = "miss"


@dataclass(eq=False)
class _Probe:
    """What a lookup call's end is looked up by."""

    link: Link


_OWNERS = (FillBatch, CascadeBatch, _Probe)


class TierChain:
    """An open chain.  Made by ``open_chain``."""

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
        """Put opened tiers to work.  The chain closes them.

        Raises:
            ConfigError: the tiers' capabilities do not allow this chain, with every reason.
            HostMemoryError: the staging pool does not fit.
        """
        findings = check_links(config.tiers, [tier.capabilities for tier in tiers])
        findings += _check_values(config.tiers, tiers, layout)
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
        self._is_closed = False
        self.num_probes = 0
        first = tiers[0] if isinstance(tiers[0], DirectTier) else None
        self.host = HostSlots(first, config.staging, layout.slot_bytes)
        self.links = [self._link(i, tier) for i, tier in enumerate(tiers)]
        self.index = BlockIndex(
            layout.block_tokens, [eviction_order(link.config.eviction) for link in self.links]
        )
        transfer.register(self.host.region)
        for link in self.links:
            link.raw.register(self.host.region)
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
        self.loads = Loads(self._parts)
        self.stores = Stores(self._parts, self.cascade, config.engine.max_store_tokens)
        self.loads.on_promoted = self.cascade.promoted
        self.cascade.tick(clock())

    def _link(self, number: int, tier: Tier) -> Link:
        config, can = self.config.tiers[number], tier.capabilities

        def changed(state: str, reason: str) -> None:
            self._completions.put(Notice(lambda: self._state_changed(config.name, state, reason)))

        wrapped = wrap(tier, config, self.layout, self.metrics, changed, self._clock)
        threads = max(1, can.max_concurrency)
        return Link(
            number=number,
            config=config,
            raw=tier,
            wrapped=wrapped,
            workers=TierWorkers(
                config.name,
                wrapped.tier,
                load_threads=min(config.load_threads or -(-threads // 2), threads),
                store_threads=min(config.store_threads or max(1, threads // 2), threads),
                lookup_threads=1 if can.shared else 0,
                completions=self._completions,
                clock=self._clock,
            ),
            capabilities=can,
            capacity_blocks=capacity_blocks(can, self.layout),
            keeps_tails=config.store_tails if config.store_tails is not None else not can.shared,
        )

    # ---- questions -----------------------------------------------------------------------------

    @property
    def num_under_way(self) -> int:
        """Loads, stores and calls that are not over; 0 means that nothing touches any slot."""
        jobs = self.loads.num_active + self.stores.num_active + self.cascade.num_waiting
        return jobs + sum(link.workers.num_open for link in self.links)

    def lookup(self, chain: BlockChain, *, start: int = 0, max_tokens: int | None = None) -> Lookup:
        """How long a prefix of ``chain`` can be restored.  A pure query: calling it changes nothing.

        Args:
            chain: The prompt, under its namespace.
            start: Tokens that the engine has already.
            max_tokens: Longest prefix that is of use; default: all.

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
        now = self._clock()
        match = self.index.match(chain, limit, self.layout.page_tokens, self._usable(now))
        match, wants_probe = self._beyond(chain, match, limit, now)
        match, is_cut = self._affordable(match, start)
        total = match.num_tokens
        if total - start < self.config.engine.min_hit_tokens:
            return Lookup(start, None, wants_probe=wants_probe, why=self._why_not(is_cut=is_cut))
        by_tier = {self.links[tier].name: count for tier, count in match.tokens_by_tier(start).items()}
        page = self.layout.page_tokens
        why = "all" if total >= limit // page * page else self._why_not(is_cut=is_cut)
        return Lookup(total, match, by_tier, wants_probe, why)

    def _why_not(self, *, is_cut: bool) -> str:
        if is_cut:
            return "host_slots"
        return "miss" if all(link.is_up for link in self.links) else "tier_down"

    def _usable(self, now: float) -> Usable:
        tiers = [link.number for link in self.links if link.is_indexed and self._is_usable(link)]
        oldest = [now - link.config.ttl_s if link.config.ttl_s else _NEVER for link in self.links]
        return Usable(tiers, oldest)

    def _is_usable(self, link: Link) -> bool:
        if link.config.load_or_recompute == "recompute" and link.number:
            return False
        return link.workers.can_load and (link.is_up or link.wrapped.breaker.wants_probe)

    def _beyond(self, chain: BlockChain, match: Match, limit: int, now: float) -> tuple[Match, bool]:
        """Add whole blocks that shared tiers are known to have behind the local hits."""
        shared = [link for link in self.links if not link.is_indexed and self._is_usable(link)]
        whole = limit // self.layout.block_tokens
        number = match.num_blocks
        if not shared or number >= whole:
            return match, False
        runs = list(match.runs)
        wants_probe = False
        while number < whole:
            key = chain.key(number)
            answers = [(link, link.known.get(key, now)) for link in shared]
            there = next((link for link, answer in answers if answer), None)
            if there is None:
                wants_probe = any(answer is None for _, answer in answers)
                break
            if runs and runs[-1].tier == there.number:
                runs[-1] = Run(there.number, runs[-1].first, number + 1)
            else:
                runs.append(Run(there.number, number, number + 1))
            number += 1
        if number == match.num_blocks:
            return match, wants_probe
        # A partly matched local block is dropped for the whole one that a shared tier has.
        return Match(tuple(runs), None, match.block_tokens), wants_probe

    def _affordable(self, match: Match, start: int) -> tuple[Match, bool]:
        """Promise no more than host slots can carry at once; True if that made it shorter."""
        room = self.host_capacity_blocks
        runs: list[Run] = []
        is_host = self.host.direct is not None
        for run in match.runs:
            first = max(run.first, start // match.block_tokens)
            if is_host and run.tier == 0:
                if run.last > first:
                    room -= run.last - run.first  # pinned, so that nothing can come in their place
                runs.append(run)
                continue
            if run.last <= first:
                runs.append(run)
                continue
            fits = max(0, min(run.last - first, room))
            room -= fits
            if fits < run.last - first:
                if first + fits > run.first:
                    runs.append(Run(run.tier, run.first, first + fits))
                return Match(tuple(runs), None, match.block_tokens), True
            runs.append(run)
        inside = match.inside
        if inside is not None and not (is_host and inside.tier == 0) and room < 1:
            return Match(match.runs, None, match.block_tokens), True
        return match, False

    @property
    def host_capacity_blocks(self) -> int:
        """Blocks that the host slots hold."""
        return self._parts.host_capacity_blocks

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
        )

    def bind(self, job: LoadJob, device_slots: Any, fence: Fence) -> None:
        """Give a load its device slots, one for each of its tokens."""
        self.loads.bind(job, device_slots, fence, self._clock())

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

    def probe(self, chain: BlockChain, first_block: int) -> int:
        """Ask the shared tiers which blocks from ``first_block`` on they have.

        Returns:
            How many calls were queued; ``num_probes`` says when they are answered.
        """
        now = self._clock()
        keys = chain.keys()[first_block:]
        calls = 0
        for link in self.links:
            if link.is_indexed or not self._is_usable(link):
                continue
            unknown = [key for key in keys if link.known.get(key, now) is None]
            size = max(1, link.capabilities.max_batch, link.capabilities.max_lookup)
            for start in range(0, len(unknown), size):
                calls += 1
                deadline = now + link.config.lookup_deadline_s
                part = unknown[start : start + size]
                link.workers.submit(Call(Verb.LOOKUP, part, deadline=deadline, owner=_Probe(link)))
        self.num_probes += calls
        return calls

    def poll(self) -> None:
        """Take in what workers and the transfer have finished.  Costs next to nothing when idle."""
        if self.num_under_way or not self._is_quiet():
            self._take_in(self._completions.drain())

    def _is_quiet(self) -> bool:
        return self._completions.is_empty()

    def wait_for_message(self, timeout_s: float) -> None:
        """Block until something has ended below, at most ``timeout_s``, and take it in."""
        self._take_in(self._completions.wait(timeout_s))

    def _take_in(self, messages: list[Message]) -> None:
        now = self._clock()
        self.cascade.tick(now)
        for message in messages:
            self._handle(message, now)
        self.loads.advance(now)
        self.stores.advance(now)
        if now - self._last_expire >= _EXPIRE_EVERY_S:
            self._last_expire = now
            for link in self.links:
                link.workers.expire(now)

    def _handle(self, message: Message, now: float) -> None:
        if isinstance(message, Notice):
            message.run()
            return
        owner = message.call.owner
        link = owner if isinstance(owner, Link) else owner.link if isinstance(owner, _OWNERS) else None
        if link is not None:
            self._retry_strays(link, message, now)
        if isinstance(message, Completed):
            if isinstance(owner, FillBatch):
                self.loads.filled(message, owner, now)
            elif isinstance(owner, CascadeBatch):
                self.cascade.stored(message, owner, now)
            elif isinstance(owner, _Probe):
                self.num_probes -= 1
                self._probed(owner.link, message, now)
        elif isinstance(message, Returned):
            if isinstance(owner, FillBatch):
                self.loads.returned(owner)
            elif isinstance(owner, CascadeBatch):
                self.cascade.returned(owner, now)

    def _retry_strays(self, link: Link, message: Completed | Returned, now: float) -> None:
        """Values that could not be removed are out of the index, and take room: tried again later."""
        is_final = isinstance(message, Returned) or not message.is_adrift
        if is_final:
            link.strays.update(dict.fromkeys(message.call.left))
            if message.call.left:
                self.metrics.count("evict_failures", len(message.call.left), tier=link.name)
        is_answering = isinstance(message, Completed) and any(o.is_ok for o in message.outcomes)
        if link.strays and is_answering:
            keys = [key for key in link.strays if not self.index.has(link.number, key)]
            link.strays.clear()
            link.evict(keys, now)

    def _probed(self, link: Link, end: Completed, now: float) -> None:
        if end.is_adrift:
            link.wrapped.breaker.report(end.outcomes[0].status, end.outcomes[0].reason)
        for key, outcome in zip(end.call.keys, end.outcomes, strict=True):
            # What could not be asked is taken as missing for a moment: it is asked again soon.
            link.known.note(key, now, is_there=outcome.is_ok)
            if outcome.status not in (Status.OK, Status.MISS):
                self.metrics.count("lookup_failures", tier=link.name, cause=outcome.status.value)

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
        for link in self.links:
            if link.is_indexed and link.capabilities.can_list:
                started = time.monotonic()
                good, bad = self._take_over(link)
                logger.info(
                    "[FlexKV] tier %s: %d blocks taken over, %d left out, %.2f s",
                    link.name,
                    good,
                    bad,
                    time.monotonic() - started,
                )

    def _take_over(self, link: Link) -> tuple[int, int]:
        good = bad = 0
        now, wall = self._clock(), self._wall_clock()
        try:
            for batch in link.raw.list_blocks():
                for block in batch:
                    if self._take_over_one(link, block, now - max(0.0, wall - block.last_used)):
                        good += 1
                    else:
                        bad += 1
        except FlexKVError as exc:
            logger.warning("[FlexKV] tier %s cannot be listed: %s", link.name, exc)
        if bad:
            self.metrics.count("foreign_blocks", bad, tier=link.name)
        over = self._parts.capacity.make_room(link, 0)
        if not link.config.read_only:
            link.evict(over, now)
        return good, bad

    def _take_over_one(self, link: Link, block: StoredBlock, created: float) -> bool:
        try:
            header = envelope.parse(block.head, self.layout)
        except envelope.BadValueError:
            return False
        if header.key != block.key or block_key(header.parent, header.tokens) != block.key:
            return False
        if self.index.has(link.number, block.key):
            return False
        self.index.add(
            link.number,
            block.key,
            header.parent,
            header.tokens,
            num_bytes=block.num_bytes,
            now=created,
            is_ready=True,
        )
        return True

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
        end = time.monotonic() + self.config.engine.shutdown_deadline_s
        if not self.drain(self.config.engine.shutdown_deadline_s):
            logger.warning("[FlexKV] %d jobs were still under way at the end", self.num_under_way)
        self._transfer.close()
        self._take_in(self._completions.drain())
        stuck = [name for link in self.links for name in link.workers.join(end)]
        if stuck:
            logger.warning("[FlexKV] threads that hang in a driver: %s", ", ".join(stuck))
        self._take_in(self._completions.drain())
        if self.index.num_pins:
            logger.warning("[FlexKV] %d pins were never given back", self.index.num_pins)
        for link in reversed(self.links):
            left_s = max(_CLOSE_AT_LEAST_S, end - time.monotonic())
            if not run_bounded(f"flexkv-{link.name}-close", link.raw.close, left_s):
                logger.warning("[FlexKV] tier %s has not closed in %.1f s", link.name, left_s)
        self.host.close()


def _check_values(configs: Sequence[TierConfig], tiers: Sequence[Tier], layout: BlockLayout) -> list[str]:
    """Whether blocks of this layout fit into the tiers at all."""
    findings = []
    for number, (config, tier) in enumerate(zip(configs, tiers, strict=True)):
        can = tier.capabilities
        where = f"tiers[{number}] ({config.name})"
        if can.max_value_bytes and layout.slot_bytes > can.max_value_bytes:
            findings.append(
                f"{where}: a block takes {layout.slot_bytes:,} B, the tier's values at most "
                f"{can.max_value_bytes:,} B: lower block_tokens"
            )
        if capacity_blocks(can, layout) == 0:
            findings.append(
                f"{where}: a block takes {layout.slot_bytes:,} B, the tier has room for "
                f"{can.capacity_bytes:,} B, which is less than one block: raise its capacity"
            )
        if number == 0 and isinstance(tier, DirectTier) != can.direct_slots:
            findings.append(
                f"{where}: the driver says direct_slots={can.direct_slots}, its class says otherwise"
            )
    return findings


def _option_fault(number: int, fault: Mapping[str, Any]) -> str:
    """One fault of a driver's options; values are never quoted, they may be secrets."""
    path = ".".join(str(part) for part in ("options", *fault["loc"]))
    return f"tiers[{number}].{path}: {fault['msg']}"


def open_chain(
    config: ChainConfig,
    layout: BlockLayout,
    namespace: Namespace,
    transfer: Transfer,
    *,
    source: str = "chain",
    observers: Observers | None = None,
    metrics: Metrics | None = None,
    on_receipt: Callable[[Receipt], None] = lambda _receipt: None,
) -> TierChain:
    """Open every tier that ``config`` names, and put them to work.  Blocks for opening and listing.

    Raises:
        ConfigError, DriverError, TierError, HostMemoryError: a tier that was asked for is never
            silently absent; those already opened are closed again.
    """
    tiers: list[Tier] = []
    try:
        for number, tier in enumerate(config.tiers):
            spec, offer = find_driver(tier.driver)
            try:
                options = spec.config.model_validate(tier.options)
            except ValidationError as exc:
                faults = exc.errors(include_input=False, include_url=False, include_context=False)
                raise ConfigError(source, [_option_fault(number, fault) for fault in faults]) from None
            context = TierContext(
                name=tier.name,
                value_bytes=layout.slot_bytes,
                head_bytes=layout.header_bytes,
                fingerprint=layout.fingerprint,
                identity=json.dumps(asdict(namespace), sort_keys=True),
            )
            tiers.append(open_tier(spec, offer.provider, options, context))
        chain = TierChain(
            config=config,
            layout=layout,
            tiers=tiers,
            transfer=transfer,
            metrics=metrics,
            observers=observers if observers is not None else Observers.installed(),
            on_receipt=on_receipt,
        )
    except BaseException:
        for opened in reversed(tiers):
            opened.close()
        raise
    chain.warm_up()
    return chain
