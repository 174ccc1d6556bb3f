"""Plain-torch stand-ins for the ``sgl_kernel`` names that SGLang wants on a CPU without AMX.

SGLang 0.5.23 with ``SGLANG_USE_CPU_ENGINE=1`` imports eight of them by name at start-up
(speculative decoding, request-pool and cache-move functions) and calls none for ordinary
serving.  ``convert_weight_packed`` must stay absent from ``torch.ops``: on a machine with AMX,
SGLang takes its presence as leave to use the real packed kernels.
"""


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new slots into its row."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Gather each request's slots out of its row."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[at : at + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        at += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    call.__name__ = name
    return call
