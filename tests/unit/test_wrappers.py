"""Each wrapper alone: guard, check, retry, breaker, meter; then all of them in their order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexkv_core.chain.calls import Call, Piece, Verb
from flexkv_core.envelope import write_header
from flexkv_core.errors import (
    CorruptBlockError,
    TierAccessError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnsupportedOperationError,
)
from flexkv_core.keys import block_key, encode_tokens
from flexkv_core.metrics import Metrics
from flexkv_core.models import TierConfig
from flexkv_core.testing import (
    FakeClock,
    Fault,
    FaultKind,
    FaultTier,
    MemoryTier,
    aligned_buffer,
    context_for,
    make_values,
    small_layout,
)
from flexkv_core.tier import BufferState, Outcome, Status, TierCapabilities
from flexkv_core.wrappers import wrap
from flexkv_core.wrappers.breaker import BreakerTier
from flexkv_core.wrappers.deadline import remaining_s, within
from flexkv_core.wrappers.guard import GuardedTier
from flexkv_core.wrappers.meter import MeteredTier
from flexkv_core.wrappers.retry import RetriedTier
from flexkv_core.wrappers.verify import VerifiedTier
from tests.support.waiting import DEADLINE_S, wait_until

LAYOUT = small_layout()
VALUES = make_values(LAYOUT, 4)
KEYS = [value.key for value in VALUES]
FOREVER_S = 1e9


@pytest.fixture
def tier() -> FaultTier:
    made = FaultTier(MemoryTier(context_for(LAYOUT)))
    made.store(KEYS, [value.view for value in VALUES])
    made.calls.clear()
    return made


def buffers(count: int = 4) -> list[memoryview]:
    return [aligned_buffer(LAYOUT.slot_bytes) for _ in range(count)]


def statuses(outcomes) -> list[str]:
    return [outcome.status.value for outcome in outcomes]


# ---- guard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["lookup", "load", "store", "evict"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TierTimeoutError("x"), "timeout"),
        (TierUnavailableError("x"), "unavailable"),
        (TierFullError("x"), "no_space"),
        (TierAccessError("x"), "denied"),
        (TierClosedError("x"), "cancelled"),
        (CorruptBlockError("x"), "corrupt"),
        (UnsupportedOperationError("x"), "unsupported"),
        (TierError("x"), "invalid"),
        (ZeroDivisionError("x"), "unavailable"),
    ],
)
def test_guard_turns_errors_into_outcomes(tier, operation, error, status):
    metrics = Metrics()
    tier.add(operation, Fault(FaultKind.RAISE, error=error))
    views = buffers() if operation == "load" else [value.view for value in VALUES]
    call = getattr(GuardedTier(tier, "t", metrics), operation)
    assert statuses(call(KEYS, views) if operation in ("load", "store") else call(KEYS)) == [status] * 4
    assert metrics.value("driver_bugs") == (not isinstance(error, TierError))


@pytest.mark.parametrize("kind", ["RETURN_NONE", "RETURN_SHORT", "RETURN_LONG", "RETURN_JUNK"])
def test_guard_answers_for_every_key(tier, kind):
    metrics = Metrics()
    tier.add("load", Fault(FaultKind[kind]))
    assert statuses(GuardedTier(tier, "t", metrics).load(KEYS, buffers())) == ["invalid"] * 4
    assert metrics.value("driver_bugs", operation="load") == 1


def test_a_reason_does_not_repeat_the_name_of_its_tier(tier):
    tier.always("load", Fault(FaultKind.RAISE, error=TierUnavailableError("tier t: refused")))
    (outcome, *_) = GuardedTier(tier, "t", Metrics()).load(KEYS, buffers())
    assert outcome.reason == "refused"


def test_what_a_buffer_held_before_is_not_what_was_loaded(tier):
    """A driver says OK and wrote nothing, and the buffer still holds the value of a former load."""
    checked = VerifiedTier(GuardedTier(tier, "t", Metrics()), LAYOUT)
    views = buffers()
    assert statuses(checked.load(KEYS, views)) == ["ok"] * 4
    tier.add("load", Fault(FaultKind.LIE))
    assert statuses(checked.load(KEYS, views)) == ["corrupt"] * 4
    assert statuses(checked.load(KEYS, views)) == ["ok"] * 4


# ---- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FLIP", "TRUNCATE", "SWAP", "LIE"])
def test_check_refuses_what_is_not_the_block(tier, kind):
    tier.store(KEYS, [value.view for value in VALUES])
    tier.add("load", Fault(FaultKind[kind], at=(1,), bit=8 * 4097))
    views = buffers()
    outcomes = VerifiedTier(tier, LAYOUT).load(KEYS, views)
    assert statuses(outcomes) == ["ok", "corrupt", "ok", "ok"]
    assert outcomes[0].num_bytes == VALUES[0].num_bytes


def test_every_bit_counts(tier):
    value = VALUES[3]
    payload = range(LAYOUT.header_bytes, value.num_bytes, 97)
    for at in [*range(0, 128, 5), 191, 192, 200, *payload]:
        tier.add("load", Fault(FaultKind.FLIP, bit=8 * at + at % 8))
        (outcome,) = VerifiedTier(tier, LAYOUT).load([value.key], buffers(1))
        assert outcome.status is Status.CORRUPT, at


@pytest.mark.parametrize(
    "claim",
    [
        Outcome(Status.OK, 1 << 40, BufferState.COMPLETE),
        Outcome(Status.OK, -5, BufferState.COMPLETE),
        Outcome(Status.OK, 5000, BufferState.UNTOUCHED),
    ],
)
def test_check_believes_no_impossible_claim(tier, claim, monkeypatch):
    monkeypatch.setattr(tier, "load", lambda keys, into: [claim])
    (outcome,) = VerifiedTier(tier, LAYOUT).load(KEYS[:1], buffers(1))
    assert outcome.status is Status.INVALID


def test_an_empty_value_is_damaged(tier, monkeypatch):
    monkeypatch.setattr(tier, "load", lambda keys, into: [Outcome(Status.OK, 0, BufferState.COMPLETE)])
    (outcome,) = VerifiedTier(tier, LAYOUT).load(KEYS[:1], buffers(1))
    assert (outcome.status, outcome.reason) == (Status.CORRUPT, "truncated header")


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_stored_values_are_padded_to_the_alignment(alignment):
    inner = MemoryTier(context_for(LAYOUT), TierCapabilities(alignment_bytes=alignment))
    values = make_values(LAYOUT, 4, alignment_bytes=4096)
    VerifiedTier(inner, LAYOUT).store(KEYS, [value.view for value in values])
    for value in values:
        length = len(inner.medium.values[value.key])
        assert length % alignment == 0
        assert value.num_bytes <= length < value.num_bytes + alignment


@pytest.mark.parametrize("alignment", [1, 4096, 16384])
def test_nothing_of_a_slots_former_block_is_stored_as_padding(alignment):
    layout = small_layout(block_tokens=64, num_layers=8, row_bytes=512)
    inner = MemoryTier(context_for(layout), TierCapabilities(alignment_bytes=alignment))
    slot = aligned_buffer(layout.slot_bytes, fill=0xEE)
    tokens = encode_tokens([1])
    write_header(slot, layout, block_key(bytes(32), tokens), bytes(32), tokens)
    slot[layout.header_bytes :][: layout.token_bytes] = bytes(layout.token_bytes)
    VerifiedTier(inner, layout).store([block_key(bytes(32), tokens)], [slot])
    (value,) = inner.medium.values.values()
    assert b"\xee" * 4 not in bytes(value)


# ---- retry ---------------------------------------------------------------------------------------


def test_only_what_may_work_is_tried_again(tier):
    pauses: list[float] = []
    tier.add(
        "load",
        Fault(FaultKind.FAIL_KEYS, at=(0,), status=Status.UNAVAILABLE),
        Fault(FaultKind.FAIL_KEYS, status=Status.TIMEOUT),
    )
    outcomes = RetriedTier(tier, 3, pauses.append).load(KEYS, buffers())
    assert statuses(outcomes) == ["ok"] * 4
    assert tier.calls == [("load", 4), ("load", 1), ("load", 1)]
    assert 0 < pauses[0] < pauses[1] * 3


@pytest.mark.parametrize(
    "status", [Status.MISS, Status.CORRUPT, Status.NO_SPACE, Status.DENIED, Status.INVALID]
)
def test_final_outcomes_are_final(tier, status):
    tier.add("load", Fault(FaultKind.FAIL_KEYS, status=status))
    RetriedTier(tier, 3, lambda _s: None).load(KEYS, buffers())
    assert len(tier.calls) == 1


def test_a_buffer_that_was_begun_stays_uncertain(tier):
    """The second try is refused before it writes: what the first one wrote is there."""
    tier.add(
        "load",
        Fault(FaultKind.FAIL_KEYS, at=(1,), status=Status.UNAVAILABLE, buffer=BufferState.UNCERTAIN),
        Fault(FaultKind.FAIL_KEYS, status=Status.DENIED),
    )
    outcome = RetriedTier(tier, 1, lambda _s: None).load(KEYS, buffers())[1]
    assert (outcome.status, outcome.buffer) == (Status.DENIED, BufferState.UNCERTAIN)


def test_a_value_that_broke_off_is_read_anew(tier):
    fault = Fault(FaultKind.FAIL_KEYS, at=(1,), status=Status.UNAVAILABLE, buffer=BufferState.UNCERTAIN)
    tier.add("load", fault)
    into = buffers()
    outcomes = RetriedTier(tier, 1, lambda _s: None).load(KEYS, into)
    assert statuses(outcomes) == ["ok"] * 4
    assert into[1][: outcomes[1].num_bytes] == VALUES[1].view


def test_tries_are_counted_and_end(tier):
    tier.always("store", Fault(FaultKind.FAIL_KEYS))
    outcomes = RetriedTier(tier, 2, lambda _s: None).store(KEYS, [value.view for value in VALUES])
    assert statuses(outcomes) == ["unavailable"] * 4
    assert len(tier.calls) == 3


def test_no_try_goes_beyond_the_deadline(tier):
    clock = FakeClock()
    tier.always("lookup", Fault(FaultKind.FAIL_KEYS))
    with within(clock() + 0.1, clock):
        RetriedTier(tier, 10, clock.advance).lookup(KEYS)
        assert remaining_s() > -0.1
    assert 1 < len(tier.calls) < 10
    assert remaining_s() == float("inf")


# ---- breaker -------------------------------------------------------------------------------------


class Watched:
    """A breaker over a tier that fails on command, and the changes it told."""

    def __init__(self, tier: FaultTier, failures: int = 2, most_wait_s: float = 0.01) -> None:
        self.tier, self.clock, self.changes = tier, FakeClock(), []
        self.breaker = BreakerTier(
            GuardedTier(tier, "t", Metrics()),
            failures=failures,
            reset_s=5.0,
            on_change=lambda state, _reason: self.changes.append(state),
            clock=self.clock,
            most_wait_s=most_wait_s,
        )

    def ask(self, fault: Fault | None = None) -> str:
        self.tier.always("lookup", fault)
        return self.breaker.lookup(KEYS[:1])[0].status.value


DOWN = Fault(FaultKind.RAISE)


def test_breaker_opens_probes_and_closes(tier):
    w = Watched(tier)
    assert w.ask(DOWN) == "unavailable"
    assert w.breaker.is_up
    assert w.ask() == "ok"
    assert [w.ask(DOWN), w.ask(DOWN)] == ["unavailable"] * 2
    assert not w.breaker.is_up
    calls = len(tier.calls)
    assert w.ask() == "unavailable"
    assert len(tier.calls) == calls
    w.clock.advance(5)
    assert w.breaker.wants_probe
    assert w.ask(DOWN) == "unavailable"
    assert not w.breaker.wants_probe
    w.clock.advance(5)
    assert w.ask() == "ok"
    assert w.breaker.is_up
    assert w.changes == ["down", "probing", "probing", "up"]


@pytest.mark.parametrize("status", [Status.MISS, Status.CORRUPT, Status.NO_SPACE])
def test_what_says_something_of_a_block_says_nothing_of_the_tier(tier, status):
    w = Watched(tier)
    for _ in range(5):
        w.ask(Fault(FaultKind.FAIL_KEYS, status=status))
    assert w.breaker.is_up


@pytest.mark.parametrize("kind", [FaultKind.RETURN_NONE, FaultKind.RETURN_SHORT, FaultKind.RETURN_JUNK])
def test_a_tier_that_answers_nonsense_is_down(tier, kind):
    """Its promises would cost every request a failed load."""
    w = Watched(tier)
    assert [w.ask(Fault(kind)) for _ in range(2)] == ["invalid"] * 2
    assert not w.breaker.is_up
    assert "nonsense" in w.breaker.reason
    w.clock.advance(5)
    assert w.ask() == "ok"
    assert w.changes == ["down", "probing", "up"]


def test_some_keys_failing_is_no_outage(tier):
    w = Watched(tier, failures=1)
    tier.add("lookup", Fault(FaultKind.FAIL_KEYS, at=(0,)))
    w.breaker.lookup(KEYS)
    assert w.breaker.is_up


def test_zero_failures_means_never(tier):
    w = Watched(tier, failures=0)
    for _ in range(20):
        w.ask(DOWN)
    w.breaker.report(Status.TIMEOUT, "late")
    assert w.breaker.is_up


def test_calls_that_were_given_up_count(tier):
    w = Watched(tier)
    for _ in range(2):
        assert w.breaker.is_up
        w.breaker.report(Status.TIMEOUT, "late")
    assert not w.breaker.is_up


def test_one_load_that_was_waited_for_to_the_end_is_enough(tier):
    w = Watched(tier, failures=9)
    w.breaker.report(Status.TIMEOUT, "late", "load", is_final=True)
    assert not w.breaker.is_up
    w.clock.advance(5)
    assert w.ask() == "ok"
    assert w.breaker.is_up


def test_a_tier_that_answers_and_brings_nothing_goes_down_and_stays_suspect(tier):
    w = Watched(tier)
    tier.always("load", DOWN)
    for _ in range(2):
        assert w.breaker.is_up
        assert w.ask() == "ok"
        w.breaker.load(KEYS, buffers())
    assert not w.breaker.is_up
    w.clock.advance(5)
    assert w.ask() == "ok"
    assert w.breaker.is_up, "the next load may find out"
    w.breaker.load(KEYS, buffers())
    assert not w.breaker.is_up, "one failure was enough this time"
    tier.always("load", None)
    w.clock.advance(5)
    w.breaker.load(KEYS, buffers())
    w.breaker.report(Status.MISS, "no outage")
    assert w.breaker.is_up


def test_one_probe_at_a_time_and_a_broken_one_is_over(tier):
    w = Watched(tier, failures=1)
    w.ask(DOWN)
    w.clock.advance(5)
    seen = []

    class Inner(FaultTier):
        def lookup(self, keys):
            seen.append(w.breaker.lookup(keys)[0].status)  # while the probe is under way
            raise SystemExit

    w.breaker.inner = Inner(tier)
    with pytest.raises(SystemExit):
        w.breaker.lookup(KEYS[:1])
    assert seen == [Status.UNAVAILABLE]
    w.breaker.inner = tier
    w.clock.advance(5)
    assert w.ask() == "ok"


OPERATIONS = {
    "lookup": lambda tier: tier.lookup(KEYS),
    "load": lambda tier: tier.load(KEYS, buffers()),
    "store": lambda tier: tier.store(KEYS, [memoryview(bytes(8))] * len(KEYS)),
    "evict": lambda tier: tier.evict(KEYS),
}


@pytest.mark.parametrize("probe", OPERATIONS)
@pytest.mark.parametrize("sibling", OPERATIONS)
@pytest.mark.parametrize("is_well", [True, False])
def test_who_comes_while_a_probe_is_under_way_gets_its_answer(tier, probe, sibling, is_well, monkeypatch):
    gate = FaultTier(tier)
    w = Watched(gate, failures=1, most_wait_s=DEADLINE_S)
    w.ask(DOWN)
    gate.always("lookup", None)
    gate.add(probe, Fault(FaultKind.HANG))
    tier.always(probe, None if is_well else DOWN)
    w.clock.advance(5)
    waiting, wait_for = threading.Semaphore(0), w.breaker._answered.wait_for

    def watched(*args, **kwargs):
        waiting.release()  # whoever answers needs the lock, which this thread has until it waits
        return wait_for(*args, **kwargs)

    before = len(gate.calls)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(OPERATIONS[probe], w.breaker)
        gate.wait_hanging()
        monkeypatch.setattr(w.breaker._answered, "wait_for", watched)
        others = [threads.submit(OPERATIONS[sibling], w.breaker) for _ in range(3)]
        assert all(waiting.acquire(timeout=DEADLINE_S) for _ in others)
        assert len(gate.calls) == before + 1
        gate.release()
        found = [one.result(DEADLINE_S)[0].status for one in (first, *others)]
    is_refused = [status is Status.UNAVAILABLE for status in found]
    assert is_refused == [not is_well] * 4
    assert len(gate.calls) == before + (4 if is_well else 1)


@pytest.mark.parametrize("limit", ["its deadline", "the breaker's patience"])
def test_a_probe_is_not_waited_for_without_an_end(tier, limit):
    w = Watched(tier, failures=1, most_wait_s=0.05 if limit == "the breaker's patience" else 600.0)
    w.ask(DOWN)
    w.tier.always("lookup", None)
    w.clock.advance(5)
    tier.add("lookup", Fault(FaultKind.HANG))
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(w.breaker.lookup, KEYS)
        tier.wait_hanging()
        with within(0.05 if limit == "its deadline" else 600.0, lambda: 0.0):
            assert w.breaker.lookup(KEYS)[0].status is Status.UNAVAILABLE
        tier.release()
        first.result(DEADLINE_S)
    assert w.breaker.is_up


@pytest.mark.parametrize("which", ["another", "the prober"])
def test_only_the_end_of_a_probe_ends_the_wait_for_it(tier, which):
    """An older call that is given up meanwhile does not end it; the probe's own giving up does."""
    gate = FaultTier(tier)
    w = Watched(gate, failures=1, most_wait_s=DEADLINE_S)
    w.ask(DOWN)
    gate.always("lookup", None)
    gate.add("load", Fault(FaultKind.HANG))
    w.clock.advance(5)
    probe, sibling, older = (Call(Verb.LOAD, KEYS) for _ in range(3))

    def load(call):
        with within(float("inf"), w.clock, Piece(call, 0, len(KEYS))):
            return w.breaker.load(KEYS, buffers())[0].status

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load, probe)
        gate.wait_hanging()
        other = threads.submit(load, sibling)
        wait_until(lambda: w.breaker._answered._waiters, "the sibling waits for the probe's end")
        given_up = probe if which == "the prober" else older
        w.breaker.report(Status.TIMEOUT, "late", "store", call=given_up)
        assert getattr(w.breaker._prober, "whole", None) is (None if which == "the prober" else probe)
        if which == "the prober":
            assert other.result(DEADLINE_S) is Status.UNAVAILABLE
        gate.release()
        first.result(DEADLINE_S)
        other.result(DEADLINE_S)
    assert w.breaker.is_up
    assert gate.calls[-1][0] == "load"
    assert [operation for operation, _ in gate.calls].count("load") == (1 if which == "the prober" else 2)


# ---- meter and the stack -------------------------------------------------------------------------


def test_meter_counts_by_operation_and_status(tier):
    metrics = Metrics()
    metered = MeteredTier(tier, "t", metrics)
    metered.load(KEYS, buffers())
    metered.evict(KEYS[:1])
    metered.lookup(KEYS)
    assert metrics.value("tier_blocks", operation="load", status="ok") == 4
    assert metrics.value("tier_blocks", operation="lookup", status="miss") == 1
    assert metrics.value("tier_bytes", operation="load") == sum(len(value.view) for value in VALUES)
    assert metrics.value("tier_bytes", operation="lookup") == 0
    assert 'tier_call_seconds_count{operation="evict",tier="t"} 1' in metrics.render()


def test_what_fails_is_named_once_in_one_line(tier, caplog, monkeypatch):
    monkeypatch.setattr("flexkv_core.wrappers.meter.LOG_EVERY_S", FOREVER_S)
    metered = MeteredTier(GuardedTier(tier, "far", Metrics()), "far", Metrics())
    tier.add("load", Fault(FaultKind.FAIL_KEYS, at=(1, 3), status=Status.CORRUPT))
    tier.always("store", Fault(FaultKind.RAISE, error=TierAccessError("no rights")))
    metered.load(KEYS, buffers())
    for _ in range(3):
        metered.store(KEYS, [value.view for value in VALUES])
    metered.lookup([bytes(32)])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("[FlexKV] tier far: load of 2 of 4 blocks failed (corrupt): ")
    assert lines[1] == "[FlexKV] tier far: store of 4 blocks failed (denied): no rights"


def test_a_miss_is_named_only_where_it_says_why(tier, caplog):
    metered = MeteredTier(VerifiedTier(tier, LAYOUT), "far", Metrics())
    assert statuses(metered.load([bytes(32)], buffers(1))) == ["miss"]
    assert not caplog.records
    tier.add("load", Fault(FaultKind.FAIL_KEYS, at=(2,), status=Status.MISS))
    metered.load(KEYS, buffers())
    (record,) = caplog.records
    assert "load of 1 of 4 blocks failed (miss): made by the test" in record.getMessage()


def test_a_tier_that_is_down_is_not_named_again_for_every_call(tier, caplog, monkeypatch):
    monkeypatch.setattr("flexkv_core.wrappers.meter.LOG_EVERY_S", FOREVER_S)
    stack = wrap(
        tier, TierConfig(name="far", driver="test", breaker_failures=1), LAYOUT, Metrics(), print
    ).tier
    tier.always("lookup", Fault(FaultKind.RAISE))
    for _ in range(3):
        stack.lookup(KEYS)
        stack.load(KEYS, buffers())
    assert len(caplog.records) == 1


def test_the_stack_retries_inside_the_breaker_and_never_a_damaged_block(tier):
    config = TierConfig(name="t", driver="x", retries=2, breaker_failures=2)
    changes: list[str] = []
    wrapped = wrap(tier, config, LAYOUT, Metrics(), lambda state, _r: changes.append(state), FakeClock())
    tier.add("load", Fault(FaultKind.FLIP))
    assert statuses(wrapped.tier.load(KEYS[:1], buffers(1))) == ["corrupt"]
    assert len(tier.calls) == 1
    tier.always("load", DOWN)
    wrapped.tier.load(KEYS[:1], buffers(1))
    assert len(tier.calls) == 4
    assert wrapped.breaker.is_up
    wrapped.tier.load(KEYS[:1], buffers(1))
    assert changes == ["down"]
    assert len(tier.calls) == 7
