"""What ``flexkv verify`` says of servers that are right, wrong, or not served from a tier."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flexkv_core import EngineError
from flexkv_core.cli import verify
from flexkv_core.cli._serving import EngineClient


@dataclass
class Script:
    """How the stand-in engine behaves: the protocol is real, its thinking is not.

    Attributes:
        host_share: What part of what a tier could give back it does give back after a flush.
        wrong_after_flush: Whether it answers other tokens then.
        busy_flushes: How many flushes it refuses first.
        api_key: What every request must show; empty: nothing.
    """

    page: int = 1
    host_share: float = 1.0
    wrong_after_flush: bool = False
    busy_flushes: int = 0
    has_server_info: bool = True
    api_key: str = ""
    seen: set[str] = field(default_factory=set)
    on_device: set[str] = field(default_factory=set)


class Handler(BaseHTTPRequestHandler):
    script: Script

    def do_GET(self) -> None:
        if not self._may():
            return
        modern = self.path == "/server_info" and self.script.has_server_info
        if modern or self.path == "/get_server_info":
            self._answer(200, json.dumps({"page_size": self.script.page}))
        else:
            self._answer(404, "not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        if self.path == "/generate":
            self._answer(200, f"data: {json.dumps(self._generate(body['text']))}\n\ndata: [DONE]\n\n")
        elif self.script.busy_flushes:
            self.script.busy_flushes -= 1
            self._answer(400, "Flush cache failed.")
        else:
            self.script.on_device.clear()
            self._answer(200, "Cache flushed.")

    def _generate(self, text: str) -> dict[str, object]:
        script, prompt_tokens = self.script, len(text.split())
        whole = verify.restorable(prompt_tokens, script.page)
        was_stored, was_flushed = text in script.seen, text not in script.on_device
        script.seen.add(text)
        script.on_device.add(text)
        host = int(whole * script.host_share) if was_stored and was_flushed else 0
        device = whole if not was_flushed else 0
        is_wrong = script.wrong_after_flush and was_stored and was_flushed
        details = {"device": device, "host": host} if device or host else None
        meta = {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": device + host,
            "cached_tokens_details": details,
            "finish_reason": {"type": "length"},
        }
        return {"text": "x", "output_ids": [7, 8, 9 + is_wrong], "meta_info": meta}

    def _may(self) -> bool:
        key = self.script.api_key
        is_known = not key or self.headers["Authorization"] == f"Bearer {key}"
        if not is_known:
            self._answer(401, "unauthorized")
        return is_known

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(address: str, phase: str, file: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    verify.add_parser(parser.add_subparsers())
    given = ["--host", address, "--phase", phase, "--baseline-file", str(file)]
    args = parser.parse_args(["verify", *given, *words])
    return int(args.run(args))


@pytest.fixture
def baseline(address: str, script: Script, tmp_path: Path) -> Path:
    file = tmp_path / "baseline.json"
    assert run(address, "baseline", file) == 0
    script.seen.clear()  # as another server would
    script.on_device.clear()
    return file


def test_baseline_keeps_text_and_tokens(baseline: Path) -> None:
    saved = json.loads(baseline.read_text())
    assert set(saved) == {"short", "medium", "long"}
    assert saved["short"]["prompt"] == "The capital of France is"
    assert saved["short"]["output_ids"] == [7, 8, 9]
    assert saved["short"]["completion_tokens"] == 3


@pytest.mark.parametrize("page", [1, 4])
def test_equal_and_hit_passes(
    address: str, script: Script, baseline: Path, page: int, capsys: pytest.CaptureFixture[str]
) -> None:
    script.page = page
    assert run(address, "test", baseline) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "Total mismatches: 0"
    assert "'host': 4}" in out


def test_other_tokens_fail(
    address: str, script: Script, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.wrong_after_flush = True
    assert run(address, "test", baseline) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "Total mismatches: 3"
    assert "DIFFERENT" in out


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_missing_or_short_hit_fails_though_the_tokens_are_equal(
    address: str, script: Script, baseline: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    script.host_share = share
    assert run(address, "test", baseline) == 1
    out = capsys.readouterr().out
    assert "MISSING HIT" in out
    assert out.splitlines()[-2:] == ["Missing host hits: 3", "Total mismatches: 0"]


def test_a_busy_engine_is_flushed_when_it_is_idle(address: str, script: Script, baseline: Path) -> None:
    script.busy_flushes = 2
    assert run(address, "test", baseline) == 0
    assert script.busy_flushes == 0


def test_an_engine_that_is_never_idle_is_an_error(
    address: str,
    script: Script,
    baseline: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script.busy_flushes = 10**6
    monkeypatch.setattr(verify, "FLUSH_DEADLINE_S", 0.0)
    assert run(address, "test", baseline) == 2
    assert "Flush cache failed" in capsys.readouterr().err


def test_older_servers_tell_their_page_elsewhere(address: str, script: Script, baseline: Path) -> None:
    script.has_server_info = False
    assert run(address, "test", baseline) == 0


def test_without_a_baseline_it_says_what_to_run(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(address, "test", tmp_path / "none.json") == 2
    assert "--phase baseline" in capsys.readouterr().err


def test_a_baseline_of_other_prompts_is_refused(
    address: str, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = json.loads(baseline.read_text())
    saved["short"]["prompt"] = "The capital of Spain is"
    baseline.write_text(json.dumps(saved))
    assert run(address, "test", baseline) == 2
    assert "'short'" in capsys.readouterr().err


def test_no_server_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("127.0.0.1:9", "baseline", tmp_path / "baseline.json") == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        '{"short": 5}',
        '{"short": {"prompt": "The capital of France is"}}',
        "{",
        "\0",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_file_that_is_no_baseline(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(content)
    assert run(address, "test", file) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert "run --phase baseline again" in said


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"-ERR unknown command\r\n", "no answer from"),
        (b"", "no answer from"),
        (HEAD + b"\r\n<html>", "the answer is empty"),
        (HEAD + b'Content-Length: 100\r\n\r\ndata: {"text"', "the answer is no JSON"),
        (HEAD + b"Content-Length: 100\r\n\r\n", "the answer is empty"),
        (HEAD + b'\r\ndata: {"meta_info": []}\n\n', "the answer is empty"),
        (HEAD + b'\r\ndata: {"error": "no model"}\n\n', "no model"),
        (
            HEAD + b'\r\ndata: {"meta_info": {"finish_reason": 5, "cached_tokens_details": []}}\n\n',
            "no output_ids",
        ),
        (HEAD + b'\r\ndata: {"meta_info": {"prompt_tokens": "x"}, "output_ids": 7}\n\n', "no output_ids"),
        pytest.param(
            HEAD + b'\r\ndata: {"meta_info": ' + b"[" * 100_000 + b"\n\n", "the answer is no JSON", id="deep"
        ),
    ],
)
def test_a_server_that_is_another_kind_of_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: bytes, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):  # to the end: what is left unread would reset the connection
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        status = run(f"127.0.0.1:{listener.getsockname()[1]}", "baseline", tmp_path / "baseline.json")
        thread.join()
    assert status == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "baseline.json").exists()


@pytest.mark.parametrize(
    "address", ["host:port", "a b", "http://", "://", "a..b:80", "x" * 70 + ".org", "127.0.0.1:9/\u00e9"]
)
def test_an_address_that_is_none(tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(address, "baseline", tmp_path / "baseline.json") == 2
    err = capsys.readouterr().err
    assert err.startswith("flexkv verify: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("address", ["a..b:80", "x" * 70 + ".org", "127.0.0.1:9/\u00e9"])
def test_a_client_calls_it_an_error_of_the_engine(address: str) -> None:
    client = EngineClient(address)
    with pytest.raises(EngineError, match="is no address of a server"):
        client.server_info()
    assert not client.is_ready()


def test_the_baseline_is_for_its_owner_only(address: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text("x" * 100_000)
    file.chmod(0o666)
    assert run(address, "baseline", file) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert set(json.loads(file.read_text())) == {"short", "medium", "long"}


@pytest.mark.parametrize("is_there", [True, False])
def test_the_baseline_is_not_written_through_a_link(
    address: str, tmp_path: Path, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, file = tmp_path / "victim", tmp_path / "baseline.json"
    if is_there:
        victim.write_text("precious")
    file.symlink_to(victim)
    assert run(address, "baseline", file) == 2
    assert f"{file} is a symbolic link" in capsys.readouterr().err
    assert victim.exists() is is_there
    assert not is_there or victim.read_text() == "precious"


def test_a_server_with_a_key_is_shown_it(
    address: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.api_key = "k-123"
    monkeypatch.setenv("THE_KEY", "k-123\n")  # as from a file
    file = tmp_path / "baseline.json"
    assert run(address, "baseline", file, "--api-key-env", "THE_KEY") == 0
    script.seen.clear()
    script.on_device.clear()
    assert run(address, "test", file, "--api-key-env", "THE_KEY") == 0


def test_a_server_with_a_key_refuses_who_shows_none(
    address: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.api_key = "k-123"
    assert run(address, "baseline", tmp_path / "baseline.json") == 2
    assert "answered 401: unauthorized" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, "", "k-1\nk-2", "k-\u00e9"])
def test_a_key_that_is_none_is_said_without_its_value(
    address: str,
    tmp_path: Path,
    value: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("THE_KEY", value)
    assert run(address, "baseline", tmp_path / "baseline.json", "--api-key-env", "THE_KEY") == 2
    err = capsys.readouterr().err
    assert "THE_KEY" in err
    assert "k-" not in err
