"""What `explain` returns."""

from __future__ import annotations

from typing import NamedTuple

from .checks import describe_device


class Explanation(NamedTuple):
    """Lines of plain text; `str` joins them."""

    lines: tuple[str, ...]

    @staticmethod
    def of(call, backend_lines: list[str]) -> Explanation:
        """One line on the problem, then the backend's."""
        p = call.problem
        masks = (["causal"] if p.causal else []) + ([f"window {p.window}"] if p.window != (-1, -1) else [])
        masks += [name for name in call.views if "seqlens" in name]
        if p.masked and p.q_offset is not None:
            masks.append(f"q_offset {p.q_offset}")
        parts = [
            p.dtype,
            f"layout {p.layout}",
            f"{'segments' if p.packed else 'B'} {p.batch}",
            f"H {p.heads}",
            f"Hk {p.heads_k1} and {p.heads_k2}",
            f"D {p.head_dim1} and {p.head_dim2}",
            *masks,
            *([f"reduction {p.reduction}"] if p.reduction != "none" else []),
            f"on {describe_device(call.framework.device)}",
        ]
        return Explanation((f"KL over {p.rows} rows and {p.seqlen_k} keys: " + ", ".join(parts), *backend_lines))

    def __str__(self) -> str:
        return "\n".join(self.lines)
