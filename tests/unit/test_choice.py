"""Load or recompute: the estimate, and the choice, as tables."""

from __future__ import annotations

import itertools
import random

import pytest

from flexkv_core.chain.choice import Cut, Offer, Speed, choose
from flexkv_core.chain.speed import SpeedEstimate

INF = float("inf")
NAMES = ["host", "disk", "far"]


def speed(fixed_s=0.0, block_s=0.0, *, known=True, may_try=False, most_s=10.0) -> Speed:
    return Speed(fixed_s, block_s, 1, known, may_try, most_s)


HOST = speed(known=False)


def weigh(offers, disk, far, rate=100.0, try_blocks=4):
    return choose(offers, [HOST, disk, far], NAMES, rate, try_blocks=try_blocks)


def host(blocks):
    return Offer(0, blocks, 10 * blocks, is_free=True)


def disk(blocks, **kind):
    return Offer(1, blocks, 10 * blocks, **kind)


def far(blocks, **kind):
    return Offer(2, blocks, 10 * blocks, **kind)


# ---- the estimate ----------------------------------------------------------------------------------


def test_latency_and_bandwidth_are_told_apart():
    estimate = SpeedEstimate()
    assert estimate.seconds_for(1) == INF
    for size in (1e6, 8e6, 2e6, 16e6):
        estimate.observe(size, 0.010 + size / 1e9, now=0.0)
    assert estimate.fixed_s == pytest.approx(0.010, rel=1e-6)
    assert estimate.per_s == pytest.approx(1e9, rel=1e-6)
    assert estimate.seconds_for(100e6) == pytest.approx(0.11, rel=1e-6)


def test_calls_of_one_size_tell_a_rate_only():
    estimate = SpeedEstimate()
    for _ in range(5):
        estimate.observe(1e6, 0.01, now=0.0)
    assert (estimate.fixed_s, round(estimate.per_s)) == (0.0, 100_000_000)


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_gives_a_negative_or_an_infinite_time(seed):
    chance, estimate, now = random.Random(seed), SpeedEstimate(), 0.0
    for _ in range(200):
        now += chance.choice([0, 0.01, 100.0, 1e6])
        estimate.observe(chance.choice([1, 4096, 1e6, 1e9]), chance.uniform(1e-6, 5.0), now)
        assert estimate.fixed_s >= 0
        assert 0 < estimate.per_s < INF


def test_nothing_is_learnt_from_nothing():
    estimate = SpeedEstimate()
    estimate.observe(0, 1.0, 0.0)
    estimate.observe(5, 0.0, 0.0)
    assert not estimate.is_known


def test_after_a_pause_the_new_outweighs_the_old():
    estimate = SpeedEstimate()
    for at in range(20):
        estimate.observe(1e6, 1.0, now=float(at))
    estimate.observe(1e6, 0.001, now=20.0)
    assert estimate.seconds_for(1e6) > 0.5, "one good call in a bad time says little"
    estimate.observe(1e6, 0.001, now=60.0)
    assert estimate.seconds_for(1e6) < 0.05


# ---- the choice ------------------------------------------------------------------------------------


def test_nothing_to_weigh():
    for offers in ([], [host(3)], [host(1), disk(2, is_forced=True), far(1, is_free=True)]):
        assert weigh(offers, speed(), speed()) == (Cut(len(offers)), None)


def test_fast_is_loaded_and_slow_is_computed():
    # ten blocks of ten tokens: a second to compute
    cut, choice = weigh([host(2), far(10)], speed(), speed(0.1, 0.05))
    assert (cut, choice.action, choice.why, choice.num_loaded) == (Cut(2), "load", "sooner", 100)
    assert (choice.load_s, choice.recompute_s) == (pytest.approx(0.6), 1.0)
    cut, choice = weigh([host(2), far(10)], speed(), speed(0.1, 0.2))
    assert (cut, choice.action, choice.why, choice.num_loaded) == (Cut(1), "recompute", "slower", 0)
    assert str(choice) == ("recompute:far(tokens=100,loaded=0,load=2100.00ms,recompute=1000.00ms,why=slower)")


def test_latency_is_worth_it_for_many_blocks_only():
    slow_start = speed(0.5, 0.01)
    assert weigh([far(3)], speed(), slow_start)[0] == Cut(0)
    assert weigh([far(30)], speed(), slow_start)[0] == Cut(1)


def test_part_of_a_prefix():
    cut, choice = weigh([disk(10), far(10)], speed(0.0, 0.01), speed(0.0, 0.3))
    assert (cut, choice.action, choice.tier, choice.num_tokens, choice.num_loaded) == (
        Cut(1),
        "part",
        "far",
        200,
        100,
    )


def test_a_slow_tier_in_front_of_much_in_the_host_is_worth_it():
    offers = [far(1), host(30)]
    assert weigh(offers, speed(), speed(0.0, 2.0))[0] == Cut(2), "2 s instead of 3.1 s"
    assert weigh(offers, speed(), speed(0.0, 4.0))[0] == Cut(0)


def test_what_is_forced_is_loaded_with_all_before_it():
    offers = [far(5), disk(1, is_forced=True), far(50)]
    cut, choice = weigh(offers, speed(), speed(0.0, 9.0))
    assert cut == Cut(2)
    assert choice.action == "part"
    assert weigh(offers, speed(), speed(known=False))[0] == Cut(2)


def test_what_is_on_its_way_is_not_weighed_again():
    cut, choice = weigh([far(5, is_free=True), far(5)], speed(), speed(0.0, 9.0))
    assert (cut, choice.num_tokens) == (Cut(1), 50)


def test_without_the_engines_speed_all_is_loaded():
    cut, choice = weigh([far(5)], speed(), speed(0.0, 9.0), rate=0.0)
    assert (cut, choice.action, choice.why, choice.load_s) == (Cut(1), "load", "no_prefill_rate", 45.0)
    assert "recompute=unknown" in str(choice)


def test_an_unknown_tier_is_tried_a_little_and_once_at_a_time():
    cut, choice = weigh([host(1), far(10)], speed(), speed(known=False, may_try=True))
    assert (cut, choice.action, choice.why, choice.num_loaded) == (Cut(1, 4), "try", "no_estimate", 40)
    assert "load=unknown" in str(choice)
    cut, choice = weigh([host(1), far(10)], speed(), speed(known=False))
    assert (cut, choice.action, choice.why) == (Cut(1), "recompute", "no_estimate")
    assert weigh([far(2)], speed(), speed(known=False, may_try=True))[0] == Cut(0, 2)


def test_a_tier_that_was_slow_is_probed():
    cut, choice = weigh([far(10)], speed(), speed(0.0, 9.0, may_try=True))
    assert (cut, choice.action, choice.why) == (Cut(0, 4), "try", "probe")


def test_what_would_miss_its_deadline_is_computed():
    patient = choose([far(10)], [HOST, speed(), speed(0.0, 1.0, most_s=20.0)], NAMES, 1.0, try_blocks=4)
    assert patient[0] == Cut(1)
    cut, choice = choose([far(10)], [HOST, speed(), speed(0.0, 1.0, most_s=5.0)], NAMES, 1.0, try_blocks=4)
    assert (cut, choice.why) == (Cut(0), "deadline")


def test_few_blocks_take_as_long_as_are_read_at_once():
    eight = Speed(0.0, 0.1, 8, True, False, 10.0)
    assert [eight.seconds(count) for count in (1, 8, 16)] == [0.8, 0.8, 1.6]


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_better_than_the_one_that_is_taken(seed):
    chance = random.Random(seed)
    offers = [chance.choice([host, disk, far])(chance.randint(1, 9)) for _ in range(chance.randint(1, 6))]
    speeds = [HOST, speed(chance.random(), chance.random() / 5), speed(chance.random(), chance.random() / 5)]
    cut, _ = choose(offers, speeds, NAMES, 100.0, try_blocks=4)

    def seconds(number: int) -> float:
        tiers: dict[int, int] = {}
        for offer in offers[:number]:
            tiers[offer.tier] = tiers.get(offer.tier, 0) + offer.num_blocks
        load_s = max([speeds[tier].seconds(n) for tier, n in tiers.items() if tier], default=0.0)
        return load_s + sum(offer.num_tokens for offer in offers[number:]) / 100.0

    best = min(map(seconds, range(len(offers) + 1)))
    assert seconds(cut.num_offers) == pytest.approx(best), (offers, speeds)


def test_the_same_question_has_the_same_answer():
    offers, speeds = [disk(3), far(4)], [HOST, speed(0.01, 0.02), speed(0.1, 0.01)]
    answers = [choose(offers, speeds, NAMES, 50.0, try_blocks=4) for _ in itertools.repeat(None, 3)]
    assert answers[0] == answers[1] == answers[2]
