"""What is measured: shapes, masks, and how much arithmetic and traffic each one is.

One product is 2 * pairs * D floating-point operations, where `pairs` counts the visible (query, key) pairs over all heads, exactly:
a causal mask halves them, a window leaves fewer. Forward: 2 products. Backward: the same 2 again and 2 for each trained side, so 4
useful for one side and 6 for both. What a kernel executes beyond that (separate dQ and dK kernels make 6 of one side's 4) earns nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

SIDES = ("q1", "k1", "q2", "k2")
SETTINGS = {("q2", "k2"): "setting 1", ("q1", "k1"): "setting 2", SIDES: "both sides"}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SUFFIXES = {"k": 1024, "m": 1024**2}

FORMULAS = """Arithmetic, with pairs = visible (query, key) pairs over batch and heads, counted exactly under causal masks and windows:
  one product          2 * pairs * D
  forward              2 products: S1 = Q1 K1^T, S2 = Q2 K2^T                        4 * pairs * D    where D1 = D2 = D
  backward, one side   4 useful: S1, S2, dQ = dS K, dK = dS^T Q                      8 * pairs * D
  backward, both       6: S1, S2, dQ1, dK1, dQ2, dK2                                12 * pairs * D
  attention (cuDNN)    forward 2, backward 5: S, dV, dP, dQ, dK
TFLOP/s is useful arithmetic over the median time. Work that a kernel repeats does not count.
GB/s counts what must move once: inputs read, row statistics and gradients written (backward: inputs and statistics read)."""


def parse_size(text: str) -> int:
    """A positive integer with an optional k (1024) or m (1024 * 1024).

    >>> parse_size("16k"), parse_size("1m"), parse_size("7")
    (16384, 1048576, 7)
    """
    digits, suffix = (text[:-1], text[-1].lower()) if text[-1:].lower() in SUFFIXES else (text, "")
    if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
        raise ValueError(f"{text!r} is no size; it takes a positive integer, as 4096 or 4k or 1m")
    return int(digits) * SUFFIXES.get(suffix, 1)


def parse_sizes(text: str) -> list[int]:
    """Sizes between commas."""
    return [parse_size(part.strip()) for part in text.split(",")]


def show_size(size: int) -> str:
    """The shortest way to write a size: the inverse of `parse_size`."""
    for suffix in ("m", "k"):
        if size % SUFFIXES[suffix] == 0:
            return f"{size // SUFFIXES[suffix]}{suffix}"
    return str(size)


@dataclass(frozen=True)
class Case:
    """One problem. `wrt` holds the gradients of the backward pass; a forward pass takes no notice of it."""

    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    head_dim1: int = 128
    head_dim2: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    wrt: tuple[str, ...] = ("q2", "k2")
    deterministic: bool = False
    portable: bool = False
    """With the kernels that the library has for cards other than Hopper."""

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads is {self.kv_heads}; it takes a divisor of --heads {self.heads}")

    @staticmethod
    def from_json(fields: dict) -> Case:
        return Case(**fields | {"window": tuple(fields["window"]), "wrt": tuple(fields["wrt"])})

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.seqlen_q

    @property
    def masked(self) -> bool:
        return self.causal or self.window != (-1, -1)

    @property
    def setting(self) -> str:
        return SETTINGS.get(self.wrt, ",".join(self.wrt))

    @property
    def options(self) -> dict:
        """Keyword arguments of `streamkl_cupy.forward`."""
        return {"causal": self.causal, "window": self.window}

    @property
    def scales(self) -> tuple[float, float]:
        return self.head_dim1**-0.5, self.head_dim2**-0.5

    def shape(self, name: str) -> tuple[int, int, int, int]:
        heads = self.heads if name[0] == "q" else self.kv_heads
        length = self.seqlen_q if name[0] == "q" else self.seqlen_k
        return (self.batch, heads, length, self.head_dim1 if name[1] == "1" else self.head_dim2)

    def visible(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First visible key and the end of the visible keys of each given row (bottom-right order)."""
        diagonal = np.asarray(rows, dtype=np.int64) + self.seqlen_k - self.seqlen_q
        left, right = self.window
        right = 0 if self.causal else right
        first = np.zeros_like(diagonal) if left < 0 else np.clip(diagonal - left, 0, self.seqlen_k)
        end = np.full_like(diagonal, self.seqlen_k) if right < 0 else np.clip(diagonal + right + 1, 0, self.seqlen_k)
        return first, np.maximum(end, first)

    @property
    def pairs(self) -> int:
        first, end = self.visible(np.arange(self.seqlen_q))
        return self.batch * self.heads * int((end - first).sum())

    def flop(self, direction: str) -> int:
        """Useful floating-point operations of "forward" or "backward"."""
        dims = {"1": self.head_dim1, "2": self.head_dim2}
        products = self.head_dim1 + self.head_dim2
        if direction == "backward":
            products += sum(dims[name[1]] for name in self.wrt)
        return 2 * self.pairs * products

    def traffic(self, direction: str) -> int:
        """Bytes that must move once: inputs, row statistics (five float32), gradients."""
        item = ITEM_BYTES[self.dtype]
        size = {name: int(np.prod(self.shape(name))) * item for name in SIDES}
        moved = sum(size.values()) + 20 * self.rows
        return moved if direction == "forward" else moved + sum(size[name] for name in self.wrt) + 4 * self.rows

    def label(self) -> str:
        lengths = show_size(self.seqlen_q) + ("" if self.seqlen_q == self.seqlen_k else f" x {show_size(self.seqlen_k)}")
        return f"{lengths} {self.mask_label()}"

    def mask_label(self) -> str:
        window = "" if self.window == (-1, -1) else f"window {self.window[0]},{self.window[1]}"
        mask = " ".join(filter(None, ("causal" if self.causal else "", window))) or "full"
        return " ".join(filter(None, (mask, self.deterministic and "deterministic", self.portable and "portable")))
