"""Plans, kept by what they depend on. Scales and offsets are the kernels' run-time arguments: a training run may change them at
every step, and finds the plans of the step before."""

from __future__ import annotations

import functools

from ..problem import Problem


def kept(choose):
    """Keeps what `choose(problem, ...)` returns. Its problem has scales of 1, and an offset of 0 for any that is a number."""

    @functools.lru_cache(maxsize=1024)
    def chosen(key, *rest):
        return choose(Problem(*key), *rest)

    @functools.wraps(choose)
    def plan(problem: Problem, *rest):
        return chosen(_key(problem), *rest)

    plan.cache_clear, plan.cache_info = chosen.cache_clear, chosen.cache_info
    return plan


def _key(p: Problem) -> tuple:
    """The fields of the problem that `choose` sees, in their order: a tuple is looked up faster than a Problem."""
    return (
        p.layout,
        p.dtype,
        p.batch,
        p.heads,
        p.heads_k1,
        p.heads_k2,
        p.seqlen_q,
        p.seqlen_k,
        p.head_dim1,
        p.head_dim2,
        1.0,
        1.0,
        p.causal,
        p.window,
        0 if isinstance(p.q_offset, int) else p.q_offset,
        p.has_seqlens_q,
        p.has_seqlens_k,
        p.reduction,
    )
