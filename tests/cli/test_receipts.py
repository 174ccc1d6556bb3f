"""What ``flexkv receipts`` makes of a server's log, with lines as the adapter and the core write them."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv_core.chain.choice import Choice
from flexkv_core.chain.receipts import Receipt
from flexkv_core.cli import main
from flexkv_core.cli._receipt_lines import Promise, read_log
from flexkv_core.cli.receipts import report
from flexkv_sglang.transfer_log import TransferLog
from tests.support.waiting import CHILD_S

SEED = 20_261
STAMP = "[2026-11-29 17:17:03] "
LOG = f"""\
{STAMP}Tree cache initialized: source=registered('flexkv') impl=FlexKVRadixCache
{STAMP}[FlexKV] Connector ready rank=0/1: layerwise=False, prefetch=True, tiers=host -> disk
{STAMP}[FlexKV] D2H transfer request: 1 finished transfer data size: 0.010000 GB transfer time: 0.0020 s \
transfer bandwidth: 5.00 GB/s rid=req-1 blocks=2 tokens=100
{STAMP}INFO: 127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK
{STAMP}[FlexKV] D2H transfer request: 2 finished transfer data size: 0.005000 GB transfer time: 0.0010 s \
transfer bandwidth: 5.00 GB/s rid=req-1 blocks=1 tokens=50 from=device
{STAMP}[FlexKV] lookup rid='req-2' prompt=205 device=0 promised=64 from=host:64 why=miss
{STAMP}[FlexKV] lookup rid='req-2' prompt=205 device=0 promised=149 from=host:64,disk:85 why=host_slots
{STAMP}[FlexKV] lookup rid='req-2' prompt=205 device=149 promised=0 from=device why=miss
{STAMP}[FlexKV] lookup rid="it's mine" prompt=9 device=8 promised=0 from=device why=all
{STAMP}[FlexKV] H2D transfer request: 3 finished transfer data size: 0.014900 GB transfer time: 0.0010 s \
transfer bandwidth: 14.90 GB/s rid='req-2' blocks=3 tokens=149 from=host:64,disk:85
{STAMP}[FlexKV] load request='req-3' status=failed tokens=0 blocks=0 bytes=0 staging=4.00ms copy=0.00ms \
total=4.00ms bandwidth=0.00GB/s from host=64 disk=128 cause=disk:corrupt
{STAMP}[FlexKV] prefetch request=req-4 status=cancelled tokens=0 blocks=0 bytes=0 staging=0.00ms \
copy=0.00ms total=1.00ms bandwidth=0.00GB/s cause=cancelled
{STAMP}[FlexKV] counters: tokens{{kind="load"}}=1
{STAMP}[FlexKV] counters: tokens{{kind="load"}}=149
"""


def rows(text: str) -> list[list[str]]:
    """The table's cells, those of a row split where two blanks stand."""
    table = text.split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table]


def test_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.log"
    file.write_text(LOG)
    assert main(["receipts", str(file)]) == 0
    out = capsys.readouterr().out
    assert rows(out) == [
        ["req-1", "D2H", "2", "150", "-", "14.3 MiB", "3.0", "5.00"],
        ["req-2", "H2D", "1", "149", "host:64 disk:85", "14.2 MiB", "1.0", "14.90",
         "host_slots (149 promised of 205, 0 on the device)"],
        ["it's mine", "lookup", "-", "0", "-", "-", "-", "-", "all (0 promised of 9, 8 on the device)"],
        ["total", "D2H", "2", "150", "-", "14.3 MiB", "3.0", "5.00"],
        ["total", "H2D", "1", "149", "host:64 disk:85", "14.2 MiB", "1.0", "14.90"],
    ]  # fmt: skip
    assert out.splitlines()[-4:] == [
        "2 failed or cancelled",
        "  load req-3: failed, disk:corrupt (from host:64 disk:128)",
        "  prefetch req-4: cancelled, cancelled",
        'counters: tokens{kind="load"}=149',
    ]


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """``written(level, receipts)``: the lines that the adapter writes at a level."""

    def lines(level: int, *receipts: Receipt, is_on: bool = True) -> list[str]:
        log = TransferLog(is_on=is_on)
        caplog.clear()
        with caplog.at_level(level, logger="flexkv_sglang.transfer_log"):
            for receipt in receipts:
                log(receipt)
        return [STAMP + record.getMessage() for record in caplog.records]

    return lines


def receipt(rid: str, kind: str = "load", **facts: object) -> Receipt:
    given = {"num_tokens": 149, "num_blocks": 3, "num_bytes": 12_345_678, "copy_s": 0.00125, **facts}
    by_tier = {"host": 64, "disk": 85} if kind == "load" else {}
    return Receipt(kind, rid, "ok", tokens_by_tier=by_tier, **given)  # type: ignore[arg-type] # of its fields


def test_what_the_adapter_writes_is_read(written: Callable[..., list[str]]) -> None:
    lines = written(logging.INFO, receipt("a"), receipt("a", "store"), receipt("b", "prefetch"))
    found = read_log(lines)
    assert [(entry.way, entry.rid, entry.tokens) for entry in found.transfers] == [
        ("H2D", "a", 149),
        ("D2H", "a", 149),
        ("PREFETCH", "b", 149),
    ]
    assert {entry.num_bytes for entry in found.transfers} == {12_346_000}


def test_a_job_with_two_lines_counts_once(written: Callable[..., list[str]]) -> None:
    lines = written(logging.DEBUG, receipt("a"), receipt("a"), receipt("b", "store"))
    assert len(lines) == 6
    found = read_log(lines)
    assert [entry.rid for entry in found.transfers] == ["a", "a", "b"]
    assert {(entry.num_bytes, entry.seconds) for entry in found.transfers} == {(12_345_678, 0.00125)}
    assert found.transfers[0].by_tier == {"host": 64, "disk": 85}


CHOICE = Choice("recompute", "far", 512, 0, 0.812, 0.12, "slower")


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_what_was_weighed_is_told_with_its_numbers(written: Callable[..., list[str]], level: int) -> None:
    loaded = Choice("load", "far", 149, 149, 0.0125, float("inf"), "sooner")
    left = Receipt("load", "b", "recompute", 0, 0, 0, choice=CHOICE)
    found = read_log(written(level, receipt("a", choice=loaded), left))
    assert [transfer.rid for transfer in found.transfers] == ["a"]
    assert found.failures == []
    lines = report(found).splitlines()
    assert "2 weighed against computing" in lines
    assert (
        "  a: load, tier far: 149 of 149 tokens loaded; all by load 12.50ms, by compute unknown (sooner)"
        in lines
    )
    assert (
        "  b: recompute, tier far: 0 of 512 tokens loaded; all by load 812.00ms, by compute 120.00ms (slower)"
        in lines
    )


def test_a_failed_load_tells_what_was_weighed_too() -> None:
    line = Receipt("load", "a b", "failed", 0, 0, 0, {"far": 7}, cause="far:miss", choice=CHOICE).line()
    found = read_log([line])
    assert [(f.rid, f.cause, f.by_tier) for f in found.failures] == [("a b", "far:miss", {"far": 7})]
    assert [c.rid for c in found.choices.values()] == ["a b"]


def test_receipts_alone_are_enough(written: Callable[..., list[str]]) -> None:
    found = read_log(written(logging.DEBUG, receipt("a"), is_on=False))
    assert [(entry.way, entry.num_bytes) for entry in found.transfers] == [("H2D", 12_345_678)]


@pytest.mark.parametrize(
    "rid", ["plain", "it's", 'say "x"', "a b", "back\\slash", "x\ny", "blocks=1 tokens=2", ""]
)
def test_request_ids_come_back(rid: str) -> None:
    transfer = (
        "[FlexKV] H2D transfer request: 1 finished transfer data size: 0.1 GB transfer time: 0.1 s "
        f"transfer bandwidth: 1.00 GB/s rid={rid!r} blocks=1 tokens=7 from=host:7"
    )
    failure = Receipt("load", rid, "failed", 0, 0, 0, cause="host:miss").line()
    lookup = f"[FlexKV] lookup rid={rid!r} prompt=9 device=1 promised=7 from=host:7 why=miss"
    found = read_log([transfer, failure, lookup])
    assert [entry.rid for entry in found.transfers] == [rid]
    assert [(entry.rid, entry.cause) for entry in found.failures] == [(rid, "host:miss")]
    assert found.promises == {rid: Promise(rid, 9, 1, 7, {"host": 7}, "miss")}


def test_control_characters_do_not_reach_the_terminal() -> None:
    found = read_log([Receipt("load", "\x1b[2Jx\ny", "failed", 0, 0, 0, cause="\x07bell").line()])
    assert found.failures[0].rid == "\x1b[2Jx\ny"
    out = report(found)
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "load ?[2Jx?y: failed, ?bell" in out


def test_coloured_lines_are_read() -> None:
    lines = [f"\x1b[32m{line}\x1b[0m\n" for line in LOG.splitlines()]
    assert report(read_log(lines)) == report(read_log(LOG.splitlines()))


def test_a_damaged_log_is_read_as_far_as_it_can_be() -> None:
    rng = random.Random(SEED)
    for _ in range(100):
        letters = list(LOG)
        for _ in range(rng.randrange(1, 60)):
            at = rng.randrange(len(letters))
            letters[at] = rng.choice(
                ["", "\n", "\x00", "'", '"', "\\", "9" * 5000, "=", ".", "é", letters[at]]
            )
        report(read_log("".join(letters).splitlines()))


def test_bytes_that_are_no_text_are_foreign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.log"
    file.write_bytes(b"\xff\xfe\x00 progress\r" + LOG.encode() + b"\xe9")
    assert main(["receipts", str(file)]) == 0
    assert "req-2" in capsys.readouterr().out


def test_standard_input_is_a_log() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexkv_core", "receipts", "-"],
        input=b"\xff\n" + LOG.encode(),
        capture_output=True,
        timeout=CHILD_S,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert b"req-2" in done.stdout


def test_a_log_without_the_chain_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.log"
    file.write_text("one\ntwo\n")
    assert main(["receipts", str(file)]) == 1
    assert f"{file}: none of its 2 lines is of the chain" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_log_that_cannot_be_read_is_status_1(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["receipts", str(tmp_path / name)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
