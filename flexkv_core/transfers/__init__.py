"""Transfers: how bytes get between an engine's device memory and host slots.

The only package of the core that imports torch, and only when one of its modules is imported.
``torch_copy.TorchTransfer`` is the portable one; ``cuda_copy.CudaTransfer`` copies at the speed
of the link.
"""
