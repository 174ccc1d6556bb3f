"""The demonstration judges each row; one that is not what it should be is named."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from flexkv_core.cli._demo_report import Row, Source, faults, table
from flexkv_core.cli._demo_text import document
from flexkv_core.cli._progress import Progress
from flexkv_core.cli._serving import Answer

COMPUTED = Answer(" Paris.", (1, 2), 5, 0, {}, 2.0, 1.0, "length")
FROM_HOST = replace(COMPUTED, cached_tokens=4, by_tier={"device": 0, "host": 4}, first_token_s=0.1)
FROM_DISK = replace(COMPUTED, cached_tokens=4, by_tier={"device": 0, "host": 0, "storage": 4})


def row(source: Source, answer: Answer, **options: object) -> Row:
    return Row("capital", source, answer, COMPUTED, **options)  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(
    ("source", "answer"),
    [(Source.COMPUTED, COMPUTED), (Source.HOST, FROM_HOST), (Source.STORAGE, FROM_DISK)],
)
def test_a_row_as_it_should_be(source: Source, answer: Answer) -> None:
    assert faults(row(source, answer, must_contain="Paris"), page=1) == []


@pytest.mark.parametrize(
    ("source", "answer", "options", "said"),
    [
        (Source.COMPUTED, FROM_HOST, {}, "tokens by tier"),
        (Source.HOST, COMPUTED, {}, "tokens by tier"),
        (Source.HOST, FROM_DISK, {}, "tokens by tier"),
        (Source.STORAGE, FROM_HOST, {}, "tokens by tier"),
        (Source.HOST, replace(FROM_HOST, output_ids=(1, 3)), {}, "differs"),
        (Source.HOST, FROM_HOST, {"must_contain": "Rome"}, "lacks 'Rome'"),
        (Source.HOST, replace(FROM_HOST, first_token_s=1.5), {"must_be_faster": True}, "no faster"),
    ],
)
def test_a_row_that_is_wrong(source: Source, answer: Answer, options: dict[str, object], said: str) -> None:
    (fault,) = faults(row(source, answer, **options), page=1)
    assert said in fault
    assert fault.startswith(f"capital, {source.value}: ")


def test_whole_pages_are_expected() -> None:
    assert faults(row(Source.HOST, FROM_HOST), page=4) == []
    assert faults(row(Source.HOST, FROM_HOST), page=16) != []


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


def test_progress_says_how_a_step_ended() -> None:
    out = io.StringIO()
    progress = Progress(out)
    assert progress.call("counting", lambda: 3) == 3
    with pytest.raises(OSError, match="broken"), progress.step("failing"):
        raise OSError("broken")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("  counting ... done, ")
    assert lines[1].startswith("  failing ... failed, ")
