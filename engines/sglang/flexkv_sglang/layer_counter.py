"""How SGLang's passes ask for layers.

Its KV pools ask a counter before attention reads a layer (``wait_until``), and its model worker tells it that
a forward pass begins (``set_consumer``).

Threads: the scheduler's only, which launches passes.
"""

from __future__ import annotations

from typing import Any

from flexkv_core.layerwise.waits import LayerWaits

from . import compat


class LayerDoneCounter:
    """What SGLang's pools and model worker know of it: the interface of its own ``LayerDoneCounter``.

    Source: sglang 0.5.17 to 0.5.23, mem_cache/memory_pool.py, get_key_buffer; managers/tp_worker.py,
    set_hicache_consumer; model_executor/runner/prefill_cuda_graph_runner.py, _wait_for_layer_loads.

    Attributes:
        num_layers: Layers of the pool.
    """

    def __init__(self, waits: LayerWaits, *, before_pass: bool = False) -> None:
        """A counter over ``waits``.

        Args:
            waits: The loads.
            before_pass: Passes wait for all layers before they begin: a prefill that is one CUDA graph asks
                for no layer while it runs.
        """
        self.num_layers = waits.num_layers
        self._before_pass = before_pass
        self._waits = waits

    @property
    def consumer_index(self) -> int:
        """Not negative while there is something to wait for."""
        return 0 if self._waits.num_open else -1

    def set_consumer(self, index: int) -> None:  # noqa: ARG002 - which loads it reads, its requests say
        """A forward pass begins."""
        self._waits.begin_batch()
        if self._before_pass:
            self.wait_until(self.num_layers - 1)

    def wait_until(self, threshold: int) -> None:
        """The calling pass is about to read layer ``threshold``, counted from the pool's first."""
        if self._waits.num_open:
            self._waits.wait_until(threshold)


def prefill_is_one_graph(ctx: Any) -> bool:
    """Whether prefills are replayed as one CUDA graph, in which no layer asks."""
    config = getattr(ctx.server_args, "cuda_graph_config", None)
    return getattr(getattr(config, "prefill", None), "backend", None) == "full"


def lacks(ctx: Any) -> str:
    """What this SGLang lacks for passes to ask for layers; empty if it has all."""
    pool = compat.kv_pool(ctx)
    if not hasattr(pool, "register_layer_transfer_counter"):
        return f"{type(pool).__name__}.register_layer_transfer_counter"
    if prefill_is_one_graph(ctx) and not hasattr(ctx.tp_worker, "register_hicache_layer_transfer_counter"):
        return f"{type(ctx.tp_worker).__name__}.register_hicache_layer_transfer_counter"
    return ""


def register_counter(ctx: Any, waits: LayerWaits) -> None:
    """Have the pool ask before a layer is read, and the model worker tell of passes; see ``lacks``."""
    counter = LayerDoneCounter(waits, before_pass=prefill_is_one_graph(ctx))
    compat.kv_pool(ctx).register_layer_transfer_counter(counter)
    if hasattr(ctx.tp_worker, "register_hicache_layer_transfer_counter"):
        ctx.tp_worker.register_hicache_layer_transfer_counter(counter)
