"""Counters: sums by labels, text that a scraper reads, no count lost between threads."""

from __future__ import annotations

import re
import threading

from hypothesis import given
from hypothesis import strategies as st

from flexkv_core.metrics import SECONDS_BUCKETS, Metrics
from tests.support.waiting import DEADLINE_S


def test_values_sum_over_the_labels_that_are_not_asked_for():
    metrics = Metrics()
    metrics.count("misses", tier="disk", cause="corrupt")
    metrics.count("misses", 2, cause="timeout", tier="disk")
    metrics.count("misses", 4, tier="far", cause="timeout")
    assert metrics.value("misses") == 7
    assert metrics.value("misses", tier="disk") == 3
    assert metrics.value("misses", cause="timeout") == 6
    assert metrics.value("misses", tier="none") == metrics.value("nothing") == 0


def test_gauges_hold_their_last_value():
    metrics = Metrics()
    metrics.gauge("pins", 3)
    metrics.gauge("pins", 0)
    assert metrics.value("pins") == 0
    assert metrics.snapshot() == {"pins": 0}


def test_snapshot_names_series():
    metrics = Metrics()
    metrics.count("misses", tier="disk", cause="a")
    assert metrics.snapshot() == {'misses{cause="a",tier="disk"}': 1}


def test_histogram_is_cumulative_and_closed():
    metrics = Metrics()
    for seconds in (0.0001, 0.0002, 5.0, 99.0):
        metrics.observe_seconds("load", seconds, tier="disk")
    text = metrics.render()
    counts = [float(n) for n in re.findall(r"flexkv_load_bucket\{.*\} (\S+)", text)]
    assert len(counts) == len(SECONDS_BUCKETS) + 1
    assert counts == sorted(counts)
    assert counts[0] == 1, "a bound belongs to its bucket"
    assert counts[-1] == 4
    assert 'flexkv_load_count{tier="disk"} 4' in text
    assert float(re.search(r"flexkv_load_sum\{.*\} (\S+)", text)[1]) == 104.0003


LINE = re.compile(r'flexkv_\w+(\{(\w+="([^"\\\n]|\\["\\n])*",?)+\})? \S+')


@given(st.dictionaries(st.sampled_from(["tier", "cause"]), st.text(), max_size=2), st.floats(0, 1e9))
def test_every_line_can_be_read_whatever_the_labels(labels, amount):
    metrics = Metrics()
    metrics.count("misses", amount, **labels)
    metrics.observe_seconds("load", amount, **labels)
    lines = metrics.render().split("\n")
    assert lines[-2:] == ["# EOF", ""]
    for line in lines[:-2]:
        assert LINE.fullmatch(line), line


def test_large_counts_are_not_rounded():
    metrics = Metrics()
    metrics.count("bytes", 123_456_789_012)
    assert "flexkv_bytes 123456789012" in metrics.render().splitlines()


def test_no_count_is_lost_between_threads():
    metrics = Metrics()

    def work():
        for _ in range(2000):
            metrics.count("n", kind="a")
            metrics.observe_seconds("s", 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert metrics.value("n") == 8000
    assert "flexkv_s_count 8000" in metrics.render()


def test_the_line_of_the_log_tells_everything_that_went_wrong():
    metrics = Metrics()
    wrong = ["codec_failures", "evict_failures", "layerwise_aborts", "load_deadlines", "poison_found"]
    for name in wrong:
        metrics.count(name)
    metrics.count("jobs")
    metrics.gauge("weights_suspect", 0)
    assert metrics.summary() == " ".join(f"{name}=1" for name in wrong)
    metrics.gauge("weights_suspect", 1)
    assert metrics.summary().endswith("weights_suspect=1")
