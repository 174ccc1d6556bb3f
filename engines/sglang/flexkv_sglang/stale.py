"""KV on the device that may be of other weights or adapters than those that compute now.

It is neither stored nor matched with what the tiers hold, until the device was flushed.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flexkv_core.manager import Scope
from flexkv_core.metrics import Metrics

from .compat import RequestNamespace
from .identity import AdapterDigests
from .weights import WeightChanges

logger = logging.getLogger(__name__)


class StaleKV:
    """What changes of weights and adapters have left on the device.

    Attributes:
        adapters: Their names and digests.
    """

    def __init__(self, adapters: AdapterDigests, metrics: Metrics) -> None:
        """Nothing is stale."""
        self.adapters = adapters
        self._metrics = metrics
        self._weights = WeightChanges()
        self._mixed: set[str] = set()
        self._flush: Callable[[], bool] = lambda: False
        self._is_flushing = False

    def may_be(self, namespace: RequestNamespace) -> bool:
        """Whether a request's KV on the device may be."""
        return self._weights.are_suspect or namespace.adapter in self._mixed

    def scope(self, namespace: RequestNamespace) -> Scope:
        """What separates a request in the tiers."""
        return Scope(
            adapter=self.adapters.name(namespace.adapter),
            adapter_digest=self.adapters.of(namespace.adapter),
            extra_key=namespace.extra_key,
            cache_salt=namespace.salt,
        )

    def weights_change(self, reason: str) -> None:
        """They are about to, or may have."""
        if not self._weights.are_suspect:  # a session may bring its tensors in a hundred calls
            logger.warning(
                "[FlexKV] %s: all tiers are invalidated; nothing is stored or restored before the next flush",
                reason,
            )
        self._weights.begins()
        self._metrics.gauge("weights_suspect", 1)

    def weights_settled(self, call: str, flush: Callable[[], bool], *, is_ok: bool) -> None:
        """The call that changed them is over; ``flush`` empties the device."""
        self._weights.ended(call, is_ok=is_ok)
        self._flush = flush
        if not is_ok:
            logger.warning(
                "[FlexKV] %s has failed, and may have changed some weights: the device is flushed when "
                "no request runs",
                call,
            )
        self.flush_if_owed()

    def flush_if_owed(self) -> None:
        """Empty the device where SGLang does not, once nothing runs; a flush ticks, too."""
        if self._weights.want_flush and not self._is_flushing:
            self._is_flushing = True
            try:
                self._flush()
            finally:
                self._is_flushing = False

    def adapter_loaded(self, lora_id: str) -> bool:
        """Whether an adapter that was loaded has another content than under this id before."""
        if not self.adapters.loaded(lora_id):
            return False
        logger.warning(
            "[FlexKV] LoRA adapter %s was loaded with another content: until the next flush nothing of it is "
            "stored or restored",
            lora_id,
        )
        self._mixed.add(lora_id)
        return True

    def flushed(self) -> None:
        """The device is empty."""
        self._mixed.clear()
        self._weights.flushed()
        self._metrics.gauge("weights_suspect", int(self._weights.are_suspect))
