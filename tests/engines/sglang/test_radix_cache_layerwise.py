"""IP mode on the scheduler model: what a pass reads, who waits for whom, what becomes of a failed load.

Tests with ``cured`` switch a cure off to show that they see the hazard: then a pass reads wrong KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from flexkv_core import EngineError
from flexkv_core.layerwise import counters
from flexkv_sglang import compat, startup
from flexkv_sglang.layer_counter import LayerDoneCounter, lacks
from flexkv_sglang.mode_choice import ModeChoice
from flexkv_sglang.seam import Generation
from tests.support import sglang_dialect as dialect
from tests.support.sglang_device import LAYERS
from tests.support.sglang_world import Job, SglangWorld, cpu, ssd, world
from tests.support.waiting import DEADLINE_S

PAGES = [1, 16]
CURED = pytest.mark.parametrize("cured", [True, False], ids=["cured", "hazard"])
IP = {"layerwise": True}
WRONG = "wrong KV"


@contextmanager
def ip_world(
    tmp_path: Path,
    *prompts: range,
    streams: bool = False,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[SglangWorld]:
    """A world in IP mode that has prompts in host slots and nothing on the device, not even what was there.

    With ``streams`` its device lags, and waits for copies itself.
    """
    with world(tmp_path, engine=IP | (engine or {}), **options) as w:
        for prompt in prompts or (range(64),):
            w.ask(prompt, outputs=1)
        assert w.flush()
        w.poison_free()
        w.transfer.orders = w.stream.lags = streams
        yield w


def _loads(w: SglangWorld) -> Any:
    loads = w.cache._layerwise
    assert loads is not None
    return loads


# ---- one load -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("pool", ["mha", "mla"])
def test_a_pass_begins_while_its_load_runs(tmp_path: Path, page: int, pool: str) -> None:
    """R79, R80: layer 0 is read before layer 1 has come; the receipt says which way the load went."""
    with ip_world(tmp_path, page=page, pool=pool) as w:
        w.transfer.layers = 1
        seen: list[bool] = []

        def at_layer(layer: int) -> None:
            if layer == 1 and not seen:
                (load,) = _loads(w)._open
                seen.append(load.load.ticket.is_layer_ready(0) and not load.load.ticket.is_layer_ready(1))
                w.transfer.layers = LAYERS

        w.on_layer = at_layer
        job = w.ask([*range(64), 1])
        assert seen == [True]
        assert job.cached == (0, 64, 0)
        assert w.count("jobs", kind="load", status="ok") == 1


@pytest.mark.parametrize("page", PAGES)
def test_a_pass_is_ordered_behind_each_layer_on_the_device(tmp_path: Path, page: int) -> None:
    """R59: with streams the scheduler goes on at once, and the pass waits on the device, by layer."""
    with ip_world(tmp_path, page=page, engine={"load_deadline_s": 5}, streams=True) as w:
        w.transfer.layers = 0
        job = w.launch([*range(64), 1], outputs=1)
        assert not w.count("layerwise_failures"), "the scheduler has waited for a layer"
        assert job.cached == (0, 64, 0)
        w.check()
        assert not _loads(w).is_idle
        w.transfer.layers = LAYERS
        w.run(job)
        w.stream.lags = False
        w.settle()


def test_matching_begins_no_load(tmp_path: Path) -> None:
    """HS-43, R80: a request that is only ranked costs no slot and no copy."""
    with ip_world(tmp_path, lpm=True) as w:
        job = w.submit([*range(64), 1])
        for _ in range(5):
            assert w.match(job) == 64
        assert _loads(w).is_idle
        assert w.allocator.available_size() == w.size
        w.run()


@pytest.mark.parametrize("page", PAGES)
def test_a_copy_that_cannot_begin_is_computed(tmp_path: Path, page: int) -> None:
    """HS-42: nothing is left of the plan; the end of the world looks for pins, tasks and slots."""
    with ip_world(tmp_path, page=page) as w:
        w.transfer.refuses = 1
        assert w.ask([*range(64), 1]).cached == (0, 0, 0)
        assert _loads(w).is_idle


def test_blocks_below_the_host_are_staged_first(tmp_path: Path) -> None:
    """The load starts at admission, once what lies on the disk has come to the host."""
    disk = ssd(tmp_path / "disk")
    with world(tmp_path, tiers=[cpu(), disk], engine=IP) as w:
        w.ask(range(100))
    with world(tmp_path, tiers=[cpu(), disk], engine=IP) as w:
        job = w.ask(range(100))
        assert job.cached is not None
        assert sum(job.cached) == 99
        assert w.count("tokens", kind="load") == 99


# ---- several loads --------------------------------------------------------------------------------


@CURED
@pytest.mark.parametrize("page", PAGES)
def test_every_load_of_a_batch_is_awaited(
    tmp_path: Path, page: int, cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HS-5, R81: a counter that takes one unit a layer for all of them lets the pass go at the first."""
    if not cured:
        plain = counters.Counter.add

        def add(self: counters.Counter) -> counters.Signal:
            signal = plain(self)
            self._num_loads = 1
            return signal

        monkeypatch.setattr(counters.Counter, "add", add)
    prompts = [range(at, at + 64) for at in (0, 100, 200)]
    with ip_world(tmp_path, *prompts, page=page) as w:
        w.transfer.holds_loads = True
        jobs = [w.submit([*prompt, 1]) for prompt in prompts]

        def release(layer: int) -> None:
            if cured:
                w.transfer.holds_loads = False

        w.on_layer = release
        if not cured:  # the first load alone runs
            first: list[int] = []

            def may_begin(copy: Any) -> bool:
                first.append(copy.ticket.job.number)
                return bool(copy.ticket.job.number == first[0])

            w.transfer._may_begin = may_begin  # type: ignore[method-assign]  # put back
            with pytest.raises(AssertionError, match=WRONG):
                w.run()
            w.is_broken = True
            w.transfer._may_begin = lambda _copy: True  # type: ignore[method-assign]  # let go on
            return
        w.run()
        assert [job.cached for job in jobs] == [(0, 64, 0)] * 3


@pytest.mark.parametrize("page", PAGES)
def test_a_request_that_is_given_anothers_load_waits_for_it(tmp_path: Path, page: int) -> None:
    """HS-6: the node is in the tree while its bytes are on the way; all passes wait for them."""
    with ip_world(tmp_path, page=page) as w:
        w.transfer.layers = 0
        first = w.submit([*range(64), 1])
        second = w.submit([*range(64), 2])

        def open_gate(layer: int) -> None:
            w.transfer.layers = max(w.transfer.layers, layer + 1)

        w.on_layer = open_gate
        w.run()
        assert first.cached == (0, 64, 0)
        assert second.cached == (64, 0, 0)


@pytest.mark.parametrize("page", PAGES)
def test_more_batches_than_counters(tmp_path: Path, page: int) -> None:
    """R82, R89: with all counters in use a load is awaited as a whole; both ways serve side by side."""
    prompts = [range(at, at + 32) for at in range(0, 500, 100)]
    with ip_world(tmp_path, *prompts, page=page, engine={"load_wait_s": 0.002}, streams=True) as w:
        w.transfer.holds_loads = True
        for prompt in prompts[:3]:
            w.launch([*prompt, 1], outputs=1)
        assert not _loads(w).wants(1 << 30)
        late = w.submit([*prompts[3], 1], outputs=1)
        w.transfer.orders = False
        w.cache.check_hicache_events()
        assert w._prefill() is None
        assert w.cache._loads.open
        w.transfer.holds_loads = False
        w.stream.run()
        w.stream.lags = False
        w.run()
        assert late.cached == (0, 32, 0)


@CURED
@pytest.mark.parametrize("skipped", [0, 1])
def test_layers_that_nobody_reads_leave_nothing_behind(
    tmp_path: Path, skipped: int, cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HS-10, R83: the units of a skipped layer must not satisfy the next load that takes the counter."""
    if not cured:
        monkeypatch.setattr(counters.Counter, "take", _take_without_emptying)
    prompts = [range(at, at + 48) for at in range(0, 400, 100)]
    with ip_world(tmp_path, *prompts) as w:
        w.skips = {skipped}
        # Copies end before anybody asks, so that nobody takes their units.
        w.on_layer = lambda _layer: [entry.load.ticket.wait(DEADLINE_S) for entry in _loads(w)._open] and None
        for prompt in prompts[:3]:  # every counter once
            job = w.submit([*prompt, 1], outputs=1)
            w.run(job)
            w.settle()
        w.skips, w.on_layer = set(), lambda _layer: None
        w.transfer.layers = 0 if skipped == 0 else 1
        job = w.submit([*prompts[3], 1], outputs=1)
        if not cured:
            w.submit([*prompts[3], 1])
            with pytest.raises(AssertionError, match=WRONG):
                w.run(job)
            w.is_broken = True
            return

        def open_gate(layer: int) -> None:
            if layer == LAYERS - 1:
                w.transfer.layers = LAYERS

        if skipped == 1:
            w.on_layer = open_gate
        else:
            w.transfer.layers = LAYERS
        w.run(job)
        assert job.cached == (0, 48, 0)


def _take_without_emptying(self: counters.Counter) -> None:
    self.generation += 1
    self._num_loads = self._waited = 0
    self._units = [0] * len(self._units)


# ---- passes that read no load ----------------------------------------------------------------------


def _open_load(w: SglangWorld, tokens: Any) -> Job:
    """A load is begun for a request, for which there is no room after all; it goes back to the queue."""
    job = w.submit(tokens)
    w.waiting.remove(job)
    w.match(job)
    loaded = dialect.load_back(job.req, w.cache)
    assert loaded is not None
    assert loaded[0] == 64
    assert not _loads(w).is_idle
    return job


@pytest.mark.parametrize("page", PAGES)
def test_a_pass_waits_only_for_loads_that_it_reads(tmp_path: Path, page: int) -> None:
    """Requests that decode go on, and a prompt without a hit: neither has a slot of the load."""
    with ip_world(tmp_path, page=page) as w:
        decoding = w.submit(range(500, 520), outputs=30)
        w.run(until=lambda: len(decoding.req.output_ids) > 2)
        w.transfer.holds_loads = True
        job = _open_load(w, [*range(64), 1])
        w.run(decoding, w.submit(range(700, 740), outputs=4))
        assert not w.count("layerwise_failures")
        w.transfer.holds_loads = False
        w.waiting.append(job)
        w.run(job)


def test_a_pass_that_reads_no_load_need_not_ask(tmp_path: Path) -> None:
    """MLA prefills without a prefix ask for no layer: what runs for others beside them is not their fault."""
    with ip_world(tmp_path) as w:
        w.transfer.holds_loads = True
        job = _open_load(w, [*range(64), 1])
        counter, w.kv.layer_transfer_counter = w.kv.layer_transfer_counter, None
        w.run(w.submit(range(700, 740), outputs=1))
        w.kv.layer_transfer_counter = counter
        assert not w.count("layerwise_failures")
        assert _loads(w).wants(1 << 40)
        w.transfer.holds_loads = False
        w.waiting.append(job)
        w.run(job)
        assert len(job.req.output_ids) == 2


def test_a_pass_must_ask_for_every_layer_that_passes_ask_for(tmp_path: Path) -> None:
    """One that asks for the first layer alone has read the others unasked: its requests are aborted."""
    with ip_world(tmp_path, range(64), range(100, 164)) as w:
        assert w.ask([*range(100, 164), *range(900, 910)]).cached == (0, 64, 0)
        counter = w.kv.layer_transfer_counter
        w.transfer.layers = 1
        first = SimpleNamespace(
            set_consumer=counter.set_consumer,
            wait_until=lambda layer: counter.wait_until(layer) if layer == 0 else None,
        )
        w.kv.layer_transfer_counter = first
        victim = w.submit([*range(64), *range(900, 910)], outputs=2)
        w.run(victim)
        assert victim.req.finished_reason.to_json()["status_code"] == 503
        assert "layer 1: the pass that reads it did not ask" in victim.req.finished_reason.message
        w.transfer.layers = LAYERS
        w.kv.layer_transfer_counter = counter


# ---- locks and leases -----------------------------------------------------------------------------


@CURED
def test_what_a_load_writes_is_locked(tmp_path: Path, cured: bool) -> None:
    """HS-7, R90: its request is gone, the device is short of room, and still nobody gets the slots."""
    with ip_world(tmp_path, page=16, streams=True) as w:  # the request's end fills no page: it stores nothing
        w.transfer.holds_loads = True
        job = w.launch([*range(64), 1], outputs=4)
        w.abort(job)
        w._finish_check(job)
        (entry,) = _loads(w)._open
        if not cured:
            w.cache.dec_lock_ref(entry.node)
        w.cache.evict(EvictParams(num_tokens=w.size))
        taken = w.size - w.allocator.available_size()
        assert (taken >= 64) is cured
        free = w.poison_free()
        w.transfer.holds_loads = False
        w.stream.abandon()
        w.tick(until=lambda: entry.load.ticket.is_over)
        touched = any((plane[free] != 0xAB).any() for plane in w.planes)
        assert touched is not cured
        w.stream.lags = False
        if not cured:
            w.is_broken = True
            return
        w.settle()


def test_a_flush_waits_for_copies_by_layer(tmp_path: Path) -> None:
    """HS-51: or is refused, in time."""
    with ip_world(tmp_path, engine={"shutdown_deadline_s": 0.1}, streams=True) as w:
        w.transfer.layers = 1
        job = w.launch([*range(64), 1], outputs=1)
        assert not w.cache.may_flush()
        w.has_time()
        w.transfer.layers = LAYERS
        w.stream.run()
        w.stream.lags = False
        w.run(job)
        assert w.flush()


# ---- loads that do not come -----------------------------------------------------------------------


def _fail(w: SglangWorld, how: str) -> None:
    if how == "late":
        w.transfer.layers = 1
    elif how == "failed":
        w.transfer.fails_at = 1
    else:
        w.transfer.layers = 1
        _loads(w)._waits._is_alive = lambda: False


STAYS_OUT = compat.seam().generation is Generation.CHECKPOINT
"""Whether a request can be kept out of the tree while the tree holds dead slots (0.5.22 and later)."""


@pytest.mark.parametrize("how", ["late", "failed", "dead"])
@pytest.mark.parametrize("page", PAGES)
def test_only_the_batch_of_a_failed_load_is_aborted(
    tmp_path: Path, page: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """HS-50, R84, R85: the scheduler lives, its other requests go on, and nobody is answered from such KV."""
    engine = IP | ({"load_deadline_s": 0.3} if how == "late" else {})
    with ip_world(tmp_path, page=page, engine=engine, size=1024) as w:
        decoding = w.submit(range(500, 520), outputs=30)
        w.run(until=lambda: len(decoding.req.output_ids) > 2)
        _fail(w, how)
        victims = [w.submit([*range(64), 1]), w.submit([*range(64), 2])]
        bystander = w.submit(range(700, 740), outputs=4)
        w.run(*victims, bystander)
        w.has_time()
        for victim in victims:
            assert victim.req.finished_reason.to_json()["status_code"] == 503
            assert not victim.req.output_ids or not STAYS_OUT
        assert len(bystander.req.output_ids) == 4
        assert not bystander.req.skip_radix_cache_insert
        message = victims[0].req.finished_reason.message
        for fact in ("rank 0, task ", ", counter ", ", layer "):
            assert fact in message
        assert w.count("layerwise_failures") == 1
        assert w.count("layerwise_aborts") == 2
        if how != "failed":  # the copy still runs: the slots are nobody's, and nobody is given them
            _loads(w)._waits._is_alive = lambda: True
            dead = set(_loads(w)._dead[0].slots.tolist())
            again = w.submit([*range(64), 3], outputs=2)
            w.run(again)
            assert again.cached == (0, 0, 0)
            assert again.req.finished_reason.to_json()["type"] == ("length" if STAYS_OUT else "abort")
            assert dead.isdisjoint(w._free())
            w.transfer.layers = LAYERS
            w.tick(until=lambda: _loads(w).is_idle)
            assert dead <= set(w._free())
        w.run(decoding)
        assert len(decoding.req.output_ids) == 30
        w.settle()
        assert w.ask([*range(64), 4]).cached == (0, 64, 0), "the host still has it"


def test_a_chunked_request_is_aborted_between_its_chunks(tmp_path: Path) -> None:
    with ip_world(tmp_path, engine={"load_deadline_s": 0.2}, chunk=32) as w:
        w.transfer.layers = 0
        job = w.submit([*range(64), *range(900, 1000)], outputs=1)
        w.run(until=lambda: job.is_aborted)
        w.transfer.layers = LAYERS
        w.settle()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("beside", ["ranked", "running"])
def test_only_while_dead_slots_are_there_is_a_request_kept_out_of_the_tree(
    tmp_path: Path, page: int, beside: str
) -> None:
    """One that was only ranked beside them, or computed its own, is kept once they are gone."""
    if beside == "running" and not STAYS_OUT:
        pytest.skip("before 0.5.22 such a request is aborted")
    with ip_world(tmp_path, page=page, engine={"load_deadline_s": 0.2}, size=1024) as w:
        _fail(w, "late")
        w.run(w.submit([*range(64), 1]))
        w.has_time()
        assert _loads(w).has_dead
        other = w.submit([*range(64), 2], outputs=40)
        if beside == "ranked":
            w.match(other)
        else:
            w.run(until=lambda: len(other.req.output_ids) > 2)
        w.transfer.layers = LAYERS
        w.tick(until=lambda: _loads(w).is_idle)
        w.run(other)
        w.settle()
        assert len(other.req.output_ids) == 40
        w.check_tree(other, 65 + 39)


@pytest.mark.parametrize("page", PAGES)
def test_nothing_of_a_failed_load_is_stored(tmp_path: Path, page: int) -> None:
    """Neither what was to be loaded nor what was computed on it."""
    with ip_world(tmp_path, page=page, engine={"load_deadline_s": 0.2}) as w:
        w.transfer.layers = 0
        job = w.submit([*range(64), 1], outputs=4)
        stored = w.count("tokens", kind="store")
        w.run(job)
        w.has_time()
        w.transfer.layers = LAYERS
        w.settle()
        assert w.count("tokens", kind="store") == stored
        assert w.ask([*range(64), 1, 5]).cached == (0, 64, 0)


def test_a_failure_that_comes_after_the_device_was_ordered_ends_the_engine(tmp_path: Path) -> None:
    """A pass has read what is not known: better no answer than a wrong one."""
    with ip_world(tmp_path, streams=True) as w:
        w.transfer.fails_at = 1
        w.transfer.layers = 1
        w.launch([*range(64), 1], outputs=1)
        w.transfer.layers = LAYERS
        w.is_broken = True
        with pytest.raises(EngineError, match="after it was used"):
            w.tick(until=lambda: False)


def test_a_failure_that_the_next_pass_finds_ends_the_engine_too(tmp_path: Path) -> None:
    """Between two looks at the copies: the pass before was ordered behind it, and its results are kept."""
    with ip_world(tmp_path, streams=True) as w:
        w.transfer.fails_at = w.transfer.layers = 1
        w.launch([*range(64), 1], outputs=1)
        (entry,) = _loads(w)._open
        entry.load.ticket.order_layer = lambda *_: False  # as a ticket says that has failed
        w.transfer.layers = LAYERS
        assert entry.load.ticket.wait(DEADLINE_S)
        w.submit([*range(64), 2], outputs=1)
        w.is_broken = True
        with pytest.raises(EngineError, match="after it was used"):
            w._prefill()


def test_a_request_that_ends_early_needs_no_load(tmp_path: Path) -> None:
    """An aborted job's own path: nothing is left of it, whichever layer the copy has reached."""
    for layers in range(LAYERS):
        with ip_world(tmp_path, streams=True) as w:
            w.transfer.layers = layers
            job = w.launch([*range(64), 1], outputs=8)
            w.abort(job)
            w.transfer.layers = LAYERS
            w.run()
            w.stream.run()
            w.stream.lags = False


def test_a_prefill_that_is_one_graph_waits_before_it_begins(tmp_path: Path) -> None:
    """R83: such a pass asks for no layer while it runs."""
    with ip_world(tmp_path) as w:
        counter = LayerDoneCounter(_loads(w)._waits, before_pass=True)
        w.kv.layer_transfer_counter = counter
        assert counter.consumer_index < 0
        asked: list[int] = []
        counter.wait_until = lambda layer: asked.append(layer) or _loads(w)._waits.wait_until(layer)  # type: ignore[method-assign]  # spied on
        w.skips = set(range(LAYERS))
        w.run(w.submit([*range(64), 1], outputs=1))
        assert asked == [LAYERS - 1]


def test_a_prefill_that_asks_for_nothing_is_found_out(tmp_path: Path) -> None:
    """A replayed graph that nobody told us of: its requests are aborted, and no other load goes that way."""
    with ip_world(tmp_path, range(64), range(100, 164)) as w:
        w.transfer.layers = 0
        counter, w.kv.layer_transfer_counter = w.kv.layer_transfer_counter, None
        victim = w.submit([*range(64), *range(900, 910)], outputs=2)
        w.run(victim)
        assert victim.req.finished_reason.to_json()["status_code"] == 503
        assert "layer 0: the pass that reads it did not ask" in victim.req.finished_reason.message
        w.transfer.layers = LAYERS
        w.kv.layer_transfer_counter = counter
        assert w.ask([*range(100, 164), *range(900, 910)]).cached == (0, 64, 0)
        assert not _loads(w).wants(1 << 40)


def test_a_copy_that_ends_while_its_pass_is_launched_does_not_hide_it(tmp_path: Path) -> None:
    """What began before the copy had ended may have read anything, however soon it ended then."""
    with ip_world(tmp_path) as w:
        w.transfer.layers = 0
        w.kv.layer_transfer_counter = None
        plain = _loads(w).abort_failed

        def late(scheduler: Any, batch: Any) -> None:
            w.transfer.layers = LAYERS
            assert all(load.ticket.wait(DEADLINE_S) for load in _loads(w)._waits._loads)
            plain(scheduler, batch)

        _loads(w).abort_failed = late  # type: ignore[method-assign]  # spied on
        victim = w.submit([*range(64), *range(900, 910)], outputs=2)
        w.run(victim)
        assert victim.req.finished_reason.to_json()["status_code"] == 503


def test_too_few_descriptors_take_the_mode_and_not_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(startup, "LayerCounters", none_left)
    with pytest.raises(EngineError, match="ulimit"), world(tmp_path, engine=IP):
        pass
    monkeypatch.setattr(startup.ModeChoice, "may_be_by_layer", True)
    with world(tmp_path) as w:
        assert w.cache._layerwise is None


@pytest.mark.parametrize("lack", ["pool", "worker"])
def test_an_sglang_without_the_hook_is_refused_by_name(
    tmp_path: Path, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it was asked for; by itself it is left alone."""
    ctx = SimpleNamespace(tp_worker=SimpleNamespace(), server_args=SimpleNamespace())
    pool = SimpleNamespace()
    if lack == "worker":
        ctx.server_args.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
        pool.register_layer_transfer_counter = None
    monkeypatch.setattr(compat, "kv_pool", lambda _ctx: pool)
    assert ".register_" in lacks(ctx)
    monkeypatch.undo()
    monkeypatch.setattr(startup, "lacks", lambda _ctx: "a.hook")
    with pytest.raises(EngineError, match="has no a.hook"), world(tmp_path, engine=IP):
        pass
    with world(tmp_path) as w:
        assert w.cache._layerwise is None


def test_auto_goes_by_bytes_and_speed() -> None:
    """Measured, smoothed; a single layer has nothing to overlap."""
    choice = ModeChoice("auto", has_streams=True, num_layers=36)
    assert choice.by_layer(100 << 20)
    assert not choice.by_layer(4 << 20)
    ticket: Any = SimpleNamespace(error=None, pace=(1 << 20, 0.001))
    for _ in range(40):
        choice.observe(ticket)  # a slow link: 1 GB/s
    assert choice.by_layer(4 << 20)
    ticket.pace = (0, 0.0)
    choice.observe(ticket)
    assert not ModeChoice("auto", has_streams=True, num_layers=1).may_be_by_layer
    assert not ModeChoice("auto", has_streams=False, num_layers=36).may_be_by_layer
    assert ModeChoice(True, has_streams=False, num_layers=36).by_layer(1)
    assert not ModeChoice(False, has_streams=True, num_layers=36).by_layer(1 << 40)


def test_auto_waits_as_a_whole_on_a_cpu(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        assert w.cache._layerwise is None
        assert w.kv.layer_transfer_counter is None
