"""What a forward call leaves behind: statistics per row, and the state object that `backward` takes.

Nothing here knows a framework: the arrays are whatever the backend made, and the properties use their own operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .problem import Problem

Array = Any
LN2 = 0.6931471805599453


class RowStats(NamedTuple):
    """Both softmax denominators and the KL of every query row, float32, shape (B, H, Nq) or (H, total_q) when packed.

    `kl` is in nats. A denominator is kept in two parts in base 2, a reference near the largest logit and the logarithm of the
    sum beyond it: their sum would lose the small part when logits are large. A row that sees no key has kl 0, ref 0 and
    logsum -inf. Parts may be saved in any format and put together again: `RowStats(kl, ref1, logsum1, ref2, logsum2)`.
    """

    kl: Array
    ref1: Array
    logsum1: Array
    ref2: Array
    logsum2: Array

    @property
    def lse1(self) -> Array:
        """Natural-log denominator of the first distribution, -inf for a row that sees no key."""
        return (self.ref1 + self.logsum1) * LN2

    @property
    def lse2(self) -> Array:
        """Natural-log denominator of the second distribution, -inf for a row that sees no key."""
        return (self.ref2 + self.logsum2) * LN2


class Inputs(NamedTuple):
    """The caller's own arrays, unchanged: what `backward` reads again."""

    q1: Array
    k1: Array
    q2: Array
    k2: Array
    cu_seqlens_q: Array = None
    cu_seqlens_k: Array = None
    seqlens_q: Array = None
    seqlens_k: Array = None
    q_offset: Array = None


@dataclass(frozen=True, eq=False)
class KLState:
    """Everything `backward` needs. It holds the inputs by reference: do not overwrite them in between.

    `KLState(rows, problem, inputs)` rebuilds one from saved parts. `reduced` is (value, factor), the reduced KL and what a mean
    divides by (its reciprocal, on the device), or None without a reduction; `backward` makes it again where it is missing.
    """

    rows: RowStats
    problem: Problem
    inputs: Inputs
    reduced: tuple[Array, Array] | None = None

    @property
    def kl(self) -> Array:
        """KL per row in nats, whatever the reduction."""
        return self.rows.kl

    @property
    def lse1(self) -> Array:
        return self.rows.lse1

    @property
    def lse2(self) -> Array:
        return self.rows.lse2

    def with_rows(self, rows: RowStats) -> KLState:
        """The same shard with the statistics of all shards (`merge`): its `backward` gives the gradients of the whole."""
        return replace(self, rows=rows, reduced=None)


class Gradients(NamedTuple):
    """Gradients in the shapes of the inputs; None where not asked for."""

    q1: Array = None
    k1: Array = None
    q2: Array = None
    k2: Array = None
