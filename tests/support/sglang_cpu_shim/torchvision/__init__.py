"""Lets the published torchvision package import beside a CPU build of torch.

Its C++ extension wants CUDA libraries and does not load there, so the operators that its Python
code registers fakes for do not exist.  Declare the two that matter, then run the real package's
own ``__init__`` in our place.  Beside a CUDA build of torch nothing needs to be declared.
"""

import importlib.machinery as _machinery
import os as _os
import sys as _sys

import torch as _torch

_here = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
_spec = _machinery.PathFinder.find_spec(
    "torchvision", [entry for entry in _sys.path if _os.path.abspath(entry or ".") != _here]
)
if _spec is None or not _spec.origin or not _spec.submodule_search_locations:
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

_library = _torch.library.Library("torchvision", "FRAGMENT")  # kept: its end would undo the declarations
if _torch.version.cuda is None:
    for _name in ("nms", "qnms"):
        if not hasattr(_torch.ops.torchvision, _name):
            _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if _os.environ.get("FLEXKV_TEST_UNPINNED"):
    import flexkv_unpinned as _unpinned  # noqa: F401 - it works by being imported

__path__ = list(_spec.submodule_search_locations)
__file__ = _spec.origin
with open(__file__, encoding="utf-8") as _source:
    exec(compile(_source.read(), __file__, "exec"))
