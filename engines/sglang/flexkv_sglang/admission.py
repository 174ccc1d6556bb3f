"""Admission: a request whose load is not over is passed over, and those behind it are looked at.

SGLang's loop over its queue goes on where the answer is ``CONTINUE``; a request that was not added then
stays in the queue and is asked first in the next pass.  It keeps its place meanwhile: a row and the tokens
that it will need are set aside, so that whoever overtakes it gets what it leaves, and no more.

``NO_TOKEN`` is SGLang's word for "not before some request has ended"; before 0.5.22 not even an idle server
asks again.  While slots are held here, which come back by themselves, it is never said.

A request for which others were retracted is not passed over: it is computed if its load is not over.

Source: sglang 0.5.16 to 0.5.23, managers/scheduler.py, _get_new_batch_prefill_raw;
managers/schedule_policy.py, PrefillAdder.add_one_req.

Threads: the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import compat
from .handover import Asking, RetryLater
from .seam_cache import SeamRadixCache

MOST_PASSED_OVER = 8
"""Requests that may be passed over in one pass; the next one ends it.  Each costs a match in every pass, and
its load holds host slots and then device slots; more than a few that wait at once wait for the same tier."""

_PASSED_OVER = "_flexkv_passed_over"


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Round ``PrefillAdder.add_one_req``: the scheduler's answer, or ours."""
    cache = adder.tree_cache
    if not isinstance(cache, SeamRadixCache):
        return original(adder, req, *args, **kwargs)
    answers, passed_over = compat.answers(), getattr(adder, _PASSED_OVER, 0)
    if passed_over and compat.free_rows(adder) <= passed_over:
        return answers.OTHER
    held = cache.tokens_held_for(compat.request_handle(req))
    asking = cache.asking = Asking(adder, held, may_wait=not adder.preempt_list)
    try:
        answer = original(adder, req, *args, **kwargs)
    except RetryLater:
        answer = answers.OTHER
    finally:
        cache.asking = None
        asking.settle()
    if asking.waits:
        return _pass_over(adder, req, cache, passed_over)
    if answer is answers.NO_TOKEN and (passed_over or cache.holds_slots()):
        return answers.OTHER
    return answer


def _pass_over(adder: Any, req: Any, cache: SeamRadixCache, passed_over: int) -> Any:
    held = cache.tokens_held_for(compat.request_handle(req))
    compat.lend_tokens(adder, held - compat.admission_tokens(adder, req))
    setattr(adder, _PASSED_OVER, passed_over + 1)
    return compat.answers().CONTINUE if passed_over < MOST_PASSED_OVER else compat.answers().OTHER
