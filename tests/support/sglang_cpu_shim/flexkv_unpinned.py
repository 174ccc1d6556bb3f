"""Plain memory wherever pinned memory is asked for: a machine without a GPU has none.

SGLang's LoRA code pins without asking whether it can (0.5.23, lora/layers.py).  Loaded by the stand-in for
``torchvision`` where ``FLEXKV_TEST_UNPINNED`` is set.
"""

import functools

import torch


def _unpinned(function):
    @functools.wraps(function)
    def call(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return call


for _name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self
