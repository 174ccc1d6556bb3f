"""``flexkv verify``: does a server give the same tokens with the chain as without it?

Two phases.  ``baseline`` asks a server without the chain and keeps its answers; ``test`` asks one
with the chain, twice: as it stands (R1), and after its device memory was flushed, so that the
prompt must come back from a tier (R2).  Tokens must be equal to the last one, and R2 must really
have been served from a tier: a check that passes without a hit has checked nothing.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from flexkv_core.errors import EngineError

from ._serving import Answer, EngineClient

FLUSH_DEADLINE_S = 60.0

PROMPTS: dict[str, tuple[str, int]] = {
    "short": ("The capital of France is", 12),
    "medium": ("Here are the first ten prime numbers in rising order: 2, 3, 5,", 24),
    "long": (
        "A report that spans many pages begins with a summary of what was measured, by whom and when. "
        "It then describes the instruments, the order of the measurements, the weather on each day, and "
        "everything that went wrong, because a reader who wants to repeat the work needs those notes more "
        "than the results. Tables follow, one for each site, and after them the discussion, in which the "
        "authors compare their figures with those of earlier years. In short, the report says that",
        60,
    ),
}
"""Name -> prompt and number of new tokens."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "verify", help="compare a server's output with and without the chain", description=__doc__
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1:30000",
        metavar="HOST:PORT",
        help="the server's address (default %(default)s)",
    )
    parser.add_argument(
        "--phase",
        choices=["baseline", "test"],
        required=True,
        help="baseline: a server without the chain; test: the same server with it",
    )
    parser.add_argument(
        "--baseline-file",
        type=Path,
        default=Path("/tmp/flexkv_baseline.json"),
        metavar="FILE",
        help="where the first phase keeps its answers for the second one (default %(default)s)",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="the variable that holds the server's API key, if it wants one"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out one phase.

    Returns:
        0 if all is equal and every R2 hit a tier; 1 if not; 2 if it could not be found out.
    """
    try:
        client = EngineClient(args.host, api_key=_api_key(args.api_key_env))
        if args.phase == "baseline":
            return _baseline(client, args.baseline_file)
        return _test(client, args.baseline_file)
    except (EngineError, OSError, ValueError) as exc:
        print(f"flexkv verify: {exc}", file=sys.stderr)
        return 2


def _api_key(variable: str | None) -> str | None:
    """The key in an environment variable; None for no variable."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):  # the HTTP library's complaint would quote it
        raise ValueError(f"the variable {variable} holds no API key: it is not set, empty, or not plain text")
    return key


def _baseline(client: EngineClient, path: Path) -> int:
    """Ask once, and keep the answers."""
    answers = {}
    for name, (prompt, length) in PROMPTS.items():
        answer = client.generate(prompt, length)
        if not answer.output_ids:
            raise EngineError(f"{client.base_url} tells no output_ids: there is nothing to compare")
        print(_line("baseline", name, answer))
        answers[name] = {
            "prompt": prompt,
            "text": answer.text,
            "output_ids": list(answer.output_ids),
            "completion_tokens": len(answer.output_ids),
        }
    _write_private(path, json.dumps(answers, indent=1))
    print(f"Baseline of {len(answers)} prompts written to {path}")
    return 0


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads.

    The default path lies in a folder where anyone may put a link, so links are not followed, and a
    file that belongs to somebody else is refused.
    """
    try:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link: remove it, or name another file") from exc
        raise
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)  # one that was there keeps its mode otherwise
        file.write(text)


def _test(client: EngineClient, path: Path) -> int:
    """Ask twice and compare both rounds."""
    expected = _read_baseline(path)
    page = page_tokens(client.server_info())
    mismatches = missing = 0
    for round_name in ("R1", "R2"):
        for name, (prompt, length) in PROMPTS.items():
            if round_name == "R2":
                client.flush(
                    FLUSH_DEADLINE_S
                )  # before each: no prompt may find another's prefix on the device
            answer = client.generate(prompt, length)
            is_equal = list(answer.output_ids) == expected[name]
            mismatches += not is_equal
            verdict = "equal" if is_equal else "DIFFERENT"
            if round_name == "R2" and answer.tier_tokens < (need := restorable(answer.prompt_tokens, page)):
                missing += 1
                verdict += f", MISSING HIT: {answer.tier_tokens} tokens from the tiers, {need} expected"
            print(f"{_line(round_name, name, answer)}  {verdict}")
            if not is_equal:
                print(f"    expected {expected[name]}\n    got      {list(answer.output_ids)}")
    print(f"Missing host hits: {missing}")
    print(f"Total mismatches: {mismatches}")
    return 1 if mismatches or missing else 0


def _read_baseline(path: Path) -> dict[str, list[int]]:
    """Output tokens by prompt; the file must be about the prompts that are asked now."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; run --phase baseline against a server without the chain")
    try:
        saved = json.loads(path.read_text())
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} is no baseline: {exc}; run --phase baseline again") from exc
    found = {name: _saved_ids(saved, name, prompt) for name, (prompt, _) in PROMPTS.items()}
    for name, ids in found.items():
        if not ids:
            raise ValueError(f"{path} has no answer to the prompt '{name}'; run --phase baseline again")
    return found


def _saved_ids(saved: Any, name: str, prompt: str) -> list[int]:
    """The output tokens of one prompt; none where the file does not have them."""
    entry = saved.get(name) if isinstance(saved, dict) else None
    if not isinstance(entry, dict) or entry.get("prompt") != prompt:
        return []
    ids = entry.get("output_ids")
    return ids if isinstance(ids, list) else []


def page_tokens(info: dict[str, Any]) -> int:
    """The engine's page size, from what it says of itself."""
    for place in (info, info.get("server_args") or {}):
        if isinstance(place, dict) and isinstance(place.get("page_size"), int):
            return int(place["page_size"])
    raise EngineError("the server does not tell its page size")


def restorable(prompt_tokens: int, page: int) -> int:
    """The longest prefix that a tier can give back: whole pages, and one token is always computed."""
    return (prompt_tokens - 1) // page * page


def _line(round_name: str, name: str, answer: Answer) -> str:
    """One answer for people: cached of prompt, the ratio, and by tier."""
    share = answer.cached_tokens / max(answer.prompt_tokens, 1)
    return (
        f"{round_name:8} {name:6} cached {answer.cached_tokens}/{answer.prompt_tokens} ({share:.0%}) "
        f"{dict(answer.by_tier)}  {len(answer.output_ids)} new tokens"
    )
