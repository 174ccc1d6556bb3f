"""A served engine, seen from outside: its HTTP front, with the standard library only.

Speaks the native API of SGLang (``/generate``, ``/flush_cache``, ``/server_info``).
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from flexkv_core.errors import EngineError

HTTP_TIMEOUT_S = 120.0
POLL_S = 0.2
_FLUSH_POLL_S = 0.02
"""An engine that has just sent an answer is idle, and may be flushed, some milliseconds later."""
# No proxy of the environment may come between: these servers stand on this machine or beside it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Answer:
    """What one request gave.

    Attributes:
        text: The generated text.
        output_ids: The generated tokens.
        prompt_tokens: Length of the prompt; 0 for a request that was aborted while it waited.
        cached_tokens: How many of them were not computed.
        by_tier: Those by where they came from: ``device``, ``host``, ``storage`` (below the first
            tier).  The three are disjoint.
        seconds: From sending to the whole answer.
        first_token_s: From sending to the first token.
        finish: Why it ended: ``length``, ``stop`` or ``abort``.
    """

    text: str
    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    first_token_s: float = 0.0
    finish: str = ""

    @property
    def tier_tokens(self) -> int:
        """Prompt tokens that came from a tier of the chain, not from the device."""
        return self.by_tier.get("host", 0) + self.by_tier.get("storage", 0)


class EngineClient:
    """Calls a server that is already there.

    Threads: any; the object holds no connection.
    """

    def __init__(
        self, base_url: str, timeout_s: float = HTTP_TIMEOUT_S, *, api_key: str | None = None
    ) -> None:
        """A client of the server at ``base_url``, which is shown ``api_key`` if it is given."""
        self.base_url = base_url if "://" in base_url else f"http://{base_url}"
        self.timeout_s = timeout_s
        self._api_key = api_key

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False, **fields: Any
    ) -> Answer:
        """Complete a text, or a list of token ids, greedily.

        Args:
            prompt: Text or token ids.
            max_new_tokens: Upper bound of the answer's length.
            ignore_eos: Go on to that bound whatever the model says.
            fields: Further fields of the request (``rid``, ``extra_key``, ``cache_salt`` ...).

        Raises:
            EngineError: no answer, or one that is no answer.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        body = {"sampling_params": sampling, "stream": True, **fields}
        body["text" if isinstance(prompt, str) else "input_ids"] = (
            prompt if isinstance(prompt, str) else list(prompt)
        )
        began = time.monotonic()
        first, last = 0.0, {}
        with self._open("/generate", body) as response, self._reading("/generate"):
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line[len(b"data: ") :])
                first = first or time.monotonic() - began
        if not isinstance(last.get("meta_info"), dict):
            raise EngineError(f"{self.base_url}/generate: {last.get('error', 'the answer is empty')}")
        return _answer(last, time.monotonic() - began, first)

    def flush(self, deadline_s: float = 60.0) -> None:
        """Empty the device's tree of prefixes, as soon as the engine is idle.

        Raises:
            EngineError: it was still not idle, or refused, at the deadline.
        """
        until = time.monotonic() + deadline_s
        while True:
            try:
                with self._open("/flush_cache", {}):
                    return
            except EngineError as exc:
                if time.monotonic() > until:
                    raise EngineError(f"not flushed within {deadline_s:.0f} s: {exc}") from exc
            time.sleep(_FLUSH_POLL_S)

    def abort(self, rid: str) -> None:
        """End a request, in whatever phase it is; unknown ones are ignored."""
        with self._open("/abort_request", {"rid": rid}):
            pass

    def server_info(self) -> dict[str, Any]:
        """The server's arguments and limits.

        Raises:
            EngineError: neither the present nor the former path answers.
        """
        try:
            return self._json("/server_info")
        except EngineError:
            return self._json("/get_server_info")

    def is_ready(self) -> bool:
        """Whether it answers at all."""
        try:
            with self._open("/health", None, timeout_s=5.0):
                return True
        except EngineError:
            return False

    def _json(self, path: str) -> dict[str, Any]:
        with self._open(path, None) as response, self._reading(path):
            answer = json.loads(response.read())
        if not isinstance(answer, dict):
            raise EngineError(f"{self.base_url}{path}: not an object")
        return answer

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float | None = None) -> Any:
        try:
            request = urllib.request.Request(self.base_url + path)
        except ValueError as exc:
            raise EngineError(f"{self.base_url} is no address of a server: {exc}") from exc
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if self._api_key is not None:  # not to whom the server may redirect to
            request.add_unredirected_header("Authorization", f"Bearer {self._api_key}")
        try:
            return _OPENER.open(request, timeout=timeout_s or self.timeout_s)
        except urllib.error.HTTPError as exc:
            with exc:
                said = exc.read(2000).decode(errors="replace").strip()
            raise EngineError(f"{self.base_url}{path} answered {exc.code}: {said}") from exc
        except UnicodeError as exc:  # a name of a host that no name server could be asked for, for one
            raise EngineError(f"{self.base_url} is no address of a server: {exc}") from exc
        except (OSError, HTTPException) as exc:
            why = getattr(exc, "reason", None) or exc  # urllib wraps what the socket said
            raise EngineError(f"no answer from {self.base_url}{path}: {why}") from exc

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Round the reading of an answer: whatever is wrong with it is an EngineError."""
        try:
            yield
        except (OSError, HTTPException) as exc:
            raise EngineError(f"{self.base_url}{path}: the answer broke off: {exc!r}") from exc
        except (ValueError, RecursionError) as exc:
            raise EngineError(f"{self.base_url}{path}: the answer is no JSON: {exc}") from exc


def _answer(body: Mapping[str, Any], seconds: float, first_token_s: float) -> Answer:
    """Read the last event of a ``/generate`` stream."""
    meta = body["meta_info"]
    details, reason = meta.get("cached_tokens_details"), meta.get("finish_reason")
    ids = body.get("output_ids")
    return Answer(
        text=str(body.get("text", "")),
        output_ids=tuple(ids) if isinstance(ids, list) else (),
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        by_tier={name: count for name, count in details.items() if isinstance(count, int)}
        if isinstance(details, dict)
        else {},
        seconds=seconds,
        first_token_s=first_token_s,
        finish=str(reason.get("type", "")) if isinstance(reason, dict) else "",
    )


def _count(meta: Mapping[str, Any], name: str) -> int:
    value = meta.get(name)
    return value if isinstance(value, int) else 0
