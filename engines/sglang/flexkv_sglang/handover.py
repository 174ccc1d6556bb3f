"""What the seam's entry points and the cache behind them hand to each other.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from . import compat
from .compat import RequestNamespace


class RetryLater(Exception):  # noqa: N818 - a verdict on its way to our hook, not an error
    """Carries "ask again" out of schedulers that have no word for it, to our hook on ``add_one_req``."""


class Verdict(Enum):
    """What a load back came to, if not to slots."""

    RECOMPUTE = "recompute"
    ASK_AGAIN = "ask again"


class Asking:
    """One question of the scheduler whether a request can be admitted (``admission``).

    Attributes:
        may_wait: Whether the request may be told to ask again.
        waits: Whether it was.
        others_run: Whether the scheduler has other work, which would stand still if it were held up.
    """

    def __init__(self, adder: Any, held: int, *, may_wait: bool) -> None:
        """Until ``settle`` the ``held`` tokens of the request's own load count as free."""
        self.may_wait = may_wait
        self.waits = False
        self.others_run = compat.has_work(adder)
        self._adder = adder
        self._held = held
        compat.lend_tokens(adder, held)

    def settle(self) -> None:
        """They count as what they are: held, or in the tree, or given up."""
        compat.lend_tokens(self._adder, -self._held)
        self._held = 0

    def has_room(self, req: Any) -> bool:
        """What SGLang has asked before the load, asked again."""
        return compat.admission_tokens(self._adder, req) < compat.free_tokens(self._adder)


class Loaded(NamedTuple):
    """A load whose bytes are in place, or ordered before the next forward pass.

    Attributes:
        node: The tree's node that ends with the last loaded token (see ``compat.insert_loaded``).
        slots: 1-D int64 on the device, one per promised token: all of them, never some (HS-49).
    """

    node: Any
    slots: torch.Tensor


class Prompt:
    """A request's tokens as far as they may be matched: whole pages, one token short of the end.

    Attributes:
        key: SGLang's key, cut to pages.  It may share memory with the live prompt: copy what is kept (HS-63).
        namespace: What separates it.
        num_tokens: Its length.
    """

    __slots__ = ("key", "namespace", "num_tokens")

    def __init__(self, key: Any, namespace: RequestNamespace) -> None:
        """A prompt of ``key``."""
        self.key = key
        self.namespace = namespace
        self.num_tokens = len(key)

    @property
    def tokens(self) -> Sequence[int]:
        """The ids, ``num_tokens`` of them; possibly the live array."""
        tokens: Sequence[int] = self.key.raw_token_ids()
        return tokens if len(tokens) == self.num_tokens else tokens[: self.num_tokens]


class Checkpoint:
    """KV of a request that the tree has just taken over; good inside ``on_checkpoint`` only.

    Attributes:
        handle: The request's attempt.
        namespace: What separates it.
        node: The tree's node that ends at ``num_tokens``.  Lock it (``inc_lock_ref``) before keeping slots.
        num_tokens: Whole pages that are in the tree.
        is_finished: Whether the request ends here; else it goes on, one more chunk or decoding.
    """

    __slots__ = ("_slots", "_tokens", "handle", "is_finished", "namespace", "node", "num_tokens")

    def __init__(
        self,
        req: Any,
        tokens: Sequence[int],
        slots: torch.Tensor,
        node: Any,
        *,
        is_finished: bool,
    ) -> None:
        """The first ``len(slots)`` of ``tokens`` lie in ``slots`` (any integer dtype, on the device)."""
        self.handle = compat.request_handle(req)
        self.namespace = compat.request_namespace(req)
        self.node = node
        self.num_tokens = len(slots)
        self.is_finished = is_finished
        self._tokens = tokens
        self._slots = slots

    @property
    def tokens(self) -> Sequence[int]:
        """A copy of the ids, ``num_tokens`` of them."""
        return self._tokens[: self.num_tokens]

    def slots(self, first: int, last: int) -> torch.Tensor:
        """A copy of the device slots of tokens ``first`` to ``last``: 1-D int64 on the device.

        It is queued on the current stream (the scheduler's), which wrote them (HS-17).
        """
        return self._slots[first:last].to(dtype=torch.int64, copy=True)
