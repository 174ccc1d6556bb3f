"""Imports of SGLang that the scheduler model needs, without what they say on a machine without a GPU."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.schedule_policy  # noqa: F401 - it brings all others
