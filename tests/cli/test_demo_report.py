"""The demonstration judges each row; one that is not what it should be is named."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from flexkv_core.cli._demo_redis import HOW_TO_GET, RedisProcess, program
from flexkv_core.cli._demo_report import Row, Source, faults, outage_faults, outage_lines, outage_of, table
from flexkv_core.cli._demo_story import local_prompts, remote_prompts, write_chain
from flexkv_core.cli._demo_text import document
from flexkv_core.cli._progress import Progress
from flexkv_core.cli._serving import Answer
from flexkv_core.config import load_config
from flexkv_core.errors import EngineError
from tests.support.redis_server import require_redis

COMPUTED = Answer(" Paris.", (1, 2), 5, 0, {}, 2.0, 1.0, "length")
FROM_HOST = replace(COMPUTED, cached_tokens=4, by_tier={"device": 0, "host": 4}, first_token_s=0.1)
FROM_DISK = replace(COMPUTED, cached_tokens=4, by_tier={"device": 0, "host": 0, "storage": 4})
LONG = replace(COMPUTED, prompt_tokens=150)
FROM_REDIS = replace(LONG, cached_tokens=128, by_tier={"device": 0, "host": 0, "storage": 128})


def row(source: Source, answer: Answer, **options: object) -> Row:
    return Row("capital", source, answer, COMPUTED, **options)  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (Source.COMPUTED, COMPUTED),
        (Source.HOST, FROM_HOST),
        (Source.STORAGE, FROM_DISK),
        (Source.REMOTE, FROM_REDIS),
        (Source.OUTAGE, LONG),
        (Source.RECOVERED, FROM_REDIS),
    ],
)
def test_a_row_as_it_should_be(source: Source, answer: Answer) -> None:
    assert faults(row(source, answer, must_contain="Paris"), page=1, block=64) == []


@pytest.mark.parametrize(
    ("source", "answer", "options", "said"),
    [
        (Source.COMPUTED, FROM_HOST, {}, "tokens by tier"),
        (Source.HOST, COMPUTED, {}, "tokens by tier"),
        (Source.HOST, FROM_DISK, {}, "tokens by tier"),
        (Source.STORAGE, FROM_HOST, {}, "tokens by tier"),
        (Source.REMOTE, LONG, {}, "tokens by tier"),
        (Source.OUTAGE, FROM_REDIS, {}, "tokens by tier"),
        (Source.OUTAGE, replace(LONG, output_ids=(1, 3)), {}, "differs"),
        (Source.RECOVERED, LONG, {}, "tokens by tier"),
        (Source.HOST, replace(FROM_HOST, output_ids=(1, 3)), {}, "differs"),
        (Source.HOST, FROM_HOST, {"must_contain": "Rome"}, "lacks 'Rome'"),
        (Source.HOST, replace(FROM_HOST, first_token_s=1.5), {"must_be_faster": True}, "no faster"),
    ],
)
def test_a_row_that_is_wrong(source: Source, answer: Answer, options: dict[str, object], said: str) -> None:
    (fault,) = faults(row(source, answer, **options), page=1, block=64)
    assert said in fault
    assert fault.startswith(f"capital, {source.value}: ")


def test_whole_pages_are_expected() -> None:
    assert faults(row(Source.HOST, FROM_HOST), page=4, block=64) == []
    assert faults(row(Source.HOST, FROM_HOST), page=16, block=64) != []


def test_the_table_is_aligned_and_complete() -> None:
    shown = table([row(Source.COMPUTED, COMPUTED), row(Source.HOST, FROM_HOST)], token_bytes=1024)
    heading, rule, first, second = shown.splitlines()
    assert heading.index("answer") == first.index("Paris.")
    assert set(rule) == {"-", " "}
    assert "4 of 5 (host 4)" in second
    assert "4.0 KiB" in second
    assert "10.0 x" in second
    assert "equal" in second


def test_days_of_the_document_differ() -> None:
    entries = [line.split(". ", 1)[1] for line in document(57).splitlines() if line.startswith("Day ")]
    assert len(entries) == len(set(entries)) == 57


def test_prompts_share_nothing() -> None:
    texts = [prompt.text for prompt in [*local_prompts(57, is_our_model=True), *remote_prompts(57)]]
    assert len({text.split()[0] for text in texts}) == len(texts)
    assert len({text[0] for text in texts}) == len(texts), "also for a tokenizer of one token a byte"


LOG = """\
x [FlexKV] tier redis: lookup of 7 blocks failed (unavailable): refused
x [FlexKV] tier other is down: not this one
x [FlexKV] tier redis is down: nobody listens
x [FlexKV] tier redis is probing: nobody listens
x [FlexKV] counters: lookup_failures{cause="unavailable",tier="redis"}=7 load_failures{tier="disk"}=1
"""


def test_an_outage_is_read_off_the_log() -> None:
    outage = outage_of(LOG + "x [FlexKV] tier redis is up\n", "redis")
    assert outage_faults(outage) == []
    assert outage_lines(outage) == [
        "down: nobody listens",
        'lookup_failures{cause="unavailable",tier="redis"}=7',
        "up again",
    ]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (LOG, "up again"),
        (LOG.replace("redis is down", "disk is down") + "[FlexKV] tier redis is up", "is down, and why"),
        (LOG.replace("lookup_f", "store_f") + "[FlexKV] tier redis is up", "no failed lookup"),
    ],
)
def test_an_outage_that_did_not_show(log: str, said: str) -> None:
    assert any(said in fault for fault in outage_faults(outage_of(log, "redis")))


@pytest.mark.parametrize("url", [None, "redis://127.0.0.1:1"])
def test_the_chain_is_a_good_one(tmp_path: Path, url: str | None) -> None:
    chain = load_config(write_chain(tmp_path / "chain.yaml", tmp_path / "ssd", url)).chain
    assert [tier.name for tier in chain.tiers] == ["host", "disk", *(["redis"] if url else [])]


def test_without_a_server_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() is None
    assert "apt-get install redis-server" in HOW_TO_GET


def test_redis_keeps_its_blocks_over_a_kill(tmp_path: Path) -> None:
    require_redis()
    command = program()
    assert command is not None
    with RedisProcess(command, tmp_path) as redis:
        assert redis._ask("SET block value") == "+OK"
        redis.kill()
        assert redis.num_blocks() == 0
        redis.start()
        assert redis.num_blocks() == 1


def test_a_redis_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not start"), RedisProcess("/bin/false", tmp_path):
        pass


def test_progress_says_how_a_step_ended() -> None:
    out = io.StringIO()
    progress = Progress(out)
    assert progress.call("counting", lambda: 3) == 3
    with pytest.raises(OSError, match="broken"), progress.step("failing"):
        raise OSError("broken")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("  counting ... done, ")
    assert lines[1].startswith("  failing ... failed, ")
