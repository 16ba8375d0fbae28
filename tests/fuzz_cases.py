"""The fuzzer's generator: case `index` of a seed, the same whenever and wherever it is drawn.

A case is a problem of `tests.problems` and a way to call the library with it: where the arrays lie, into what it writes, which
gradients are asked for, with which weights, and whether the keys come in shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkl_cupy.checks import LAYOUTS, SIDES

from . import fuzz_values
from .fuzz_places import PLACES, Place, equal_along
from .problems import DTYPES, NUMPY, Case, poisoned

PAIRS = (
    (16, 16),
    (16, 32),
    (32, 16),
    (32, 32),
    (64, 64),
    (64, 128),
    (16, 256),
    (256, 16),
    (96, 192),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
)
"""Classes of head dimensions. A kernel is compiled for each dtype and pair of classes, so their number decides how long a run
takes to start: these 13 pairs in two dtypes have every class on either side, alone and beside a wider or a narrower one. float32,
and everything wider, is one kernel for all head dimensions: 29 combinations. They are those that the tests compile ahead."""

DIMS = {16: (1, 5, 8, 12, 16), 32: (17, 24, 32), 64: (33, 48, 64), 96: (72, 96), 128: (100, 128), 192: (136, 192), 256: (200, 256)}
WIDE_PAIRS = ((257, 64), (64, 320), (576, 512), (300, 300))
ROUND = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193, 255, 256, 257)
MOST_PAIRS = 400_000
"""Logits of one side, over all heads: the dense reference takes microseconds for each thousand, and a run has 20,000 cases."""


@dataclass(frozen=True)
class FuzzCase:
    """`weight` is None, a number or a host array of the shape that is passed; `shards` are cuts of the key axis, or None."""

    case: Case
    values: str
    hidden: float | None
    exact: bool
    identical: bool
    places: dict[str, Place]
    weight: Any
    weight_place: Place
    wrt: tuple[str, ...]
    dtype: str | None
    deterministic: bool
    fresh: bool
    workspace: bool
    rebuilt: bool
    shards: tuple[int, ...] | None

    @property
    def weight_of_rows(self) -> Any:
        """The weight as the reference takes it: something that broadcasts to the rows."""
        return self.weight.reshape(()) if np.shape(self.weight) == (1,) else self.weight

    def __str__(self) -> str:
        weight = f"{self.weight.dtype} {self.weight.shape} {self.weight_place.how}" if isinstance(self.weight, np.ndarray) else self.weight
        places = ", ".join(f"{name} {place.how}" for name, place in self.places.items())
        call = f"wrt {self.wrt}, dtype {self.dtype}, grad_kl {weight}, deterministic {self.deterministic}, shards {self.shards}"
        return f"{self.case}; {places}; {call}, fresh {self.fresh}, workspace {self.workspace}, rebuilt {self.rebuilt}"


def draw(seed: int, index: int) -> FuzzCase:
    """Case `index` of a seed, independent of all others."""
    rng = np.random.default_rng((seed, index))
    values, dtype, layout = _pick(rng, list(fuzz_values.KINDS)), _pick(rng, DTYPES), _pick(rng, list(LAYOUTS))
    paired = values in fuzz_values.PAIRED
    dims, n = _head_dims(rng, dtype, paired), _lengths(rng)
    batch, heads = _fitting(n, int(rng.integers(1, 5)), int(_pick(rng, [1, 2, 2, 3, 4, 6, 8])))
    divisors = [h for h in range(1, heads + 1) if heads % h == 0]
    heads_k = [int(_pick(rng, divisors)) for _ in "12"]
    if paired:
        heads_k[1] = heads_k[0]
    options, sequences = {"layout": layout, **_mask(rng, n)}, batch
    if layout == "thd":
        sequences = int(_pick(rng, [1, 2, 3, 5, 8, 0]))
        options |= {f"cu_seqlens_{x}": _ends(rng, size, sequences) for x, size in zip("qk", n, strict=True)}
        batch = 1
    else:
        options |= {f"seqlens_{x}": _valid(rng, size, batch) for x, size in zip("qk", n, strict=True) if rng.random() < 0.3}
    if options.get("q_offset") == "vector":
        options["q_offset"] = _offsets(rng, n, sequences)
    options["reduction"] = _pick(rng, ["none"] * 4 + ["sum", "mean"])
    shapes = {f"q{s}": (batch, heads, n[0], d) for s, d in zip("12", dims, strict=True)}
    shapes |= {f"k{s}": (batch, h, n[1], d) for s, h, d in zip("12", heads_k, dims, strict=True)}
    filled = fuzz_values.fill(rng, values, {name: shapes[name] for name in SIDES}, dtype)
    options |= {f"scale{side}": scale for side, scale in filled.scales.items()}
    places = {name: Place(_pick(rng, PLACES if rng.random() < 0.5 else PLACES[:1]), int(rng.integers(2**31))) for name in SIDES}
    arrays = {name: _in_layout(array, layout) for name, array in filled.arrays.items()}
    if filled.identical:  # equal numbers, wherever they lie
        places = {name: p if p.how != "expanded" else Place("contiguous", 0) for name, p in places.items()}
    arrays = {name: equal_along(arrays[name], place) for name, place in places.items()}
    case = Case(arrays, options, values)
    hidden = _pick(rng, [None, None, np.nan, np.inf, -np.inf])
    if hidden is not None:
        case = poisoned(case, hidden)
        # What is hidden in one head or sequence is not so in another: such an array has memory of its own.
        places = {name: p if p.how != "expanded" else Place("contiguous", 0) for name, p in places.items()}
    wrt = tuple(name for name in filled.wrt if rng.random() < 0.6) or filled.wrt
    if paired and rng.random() < 0.5:
        wrt = SIDES
    whole = options["reduction"] != "none"
    cuts = None
    # Segments lose different numbers of keys to a shard: their offsets are then a vector of int32.
    if not whole and rng.random() < 0.15 and (layout != "thd" or np.ndim(options["q_offset"]) or abs(options["q_offset"] or 0) < 1 << 31):
        cuts = (0, *sorted(int(c) for c in rng.integers(0, n[1] + 1, rng.integers(0, 4))), n[1])
    weight_place = Place(_pick(rng, PLACES), int(rng.integers(2**31)))
    return FuzzCase(
        case=case,
        values=values,
        hidden=hidden,
        exact=filled.exact,
        identical=filled.identical,
        places=places,
        weight=_weight(rng, case, whole, weight_place),
        weight_place=weight_place,
        wrt=wrt,
        dtype="float32" if filled.wide or cuts or rng.random() < 0.4 else None,
        deterministic=bool(rng.random() < 0.3),
        fresh=bool(rng.random() < 0.3),
        workspace=bool(rng.random() < 0.4),
        rebuilt=bool(rng.random() < 0.2),
        shards=cuts,
    )


def _pick(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def _head_dims(rng, dtype: str, paired: bool) -> tuple[int, int]:
    wide = rng.random() < 0.06
    pairs = [p for p in (WIDE_PAIRS if wide else PAIRS) if not paired or p[0] == p[1]]
    dims = _pick(rng, pairs)
    if not wide:
        dims = tuple(int(_pick(rng, DIMS[c])) for c in dims)
    return (dims[0], dims[0]) if paired else dims


def _lengths(rng) -> tuple[int, int]:
    """Rows and keys: mostly few, now and then many on one side or both, seldom none."""
    kind = rng.random()
    few, some, many = (lambda: int(rng.integers(1, 71))), (lambda: int(rng.integers(1, 301))), (lambda: int(rng.integers(301, 2001)))
    if kind < 0.50:
        return few(), few()
    if kind < 0.70:
        return int(_pick(rng, ROUND)), int(_pick(rng, ROUND))
    if kind < 0.94:
        return some(), some()
    if kind < 0.96:
        return int(rng.integers(1, 17)), many()
    if kind < 0.975:
        return many(), few()
    if kind < 0.98:
        return many() // 2, many() // 2
    return _pick(rng, [(0, few()), (few(), 0), (0, 0)])


def _fitting(n, batch: int, heads: int) -> tuple[int, int]:
    while batch * heads * n[0] * n[1] > MOST_PAIRS and batch * heads > 1:
        batch, heads = (batch - 1, heads) if batch > 1 else (1, heads - 1)
    return batch, heads


def _mask(rng, n) -> dict[str, Any]:
    """A mask, or none in half of the cases."""
    if rng.random() < 0.4:
        return {"q_offset": _pick(rng, [None, 3, "vector"])}  # without a mask an offset has no effect
    side = lambda: int(_pick(rng, [-1, -1, 0, 1, 7, 64, 200, max(n), 1 << 33]))  # noqa: E731
    mask = {
        "causal": bool(rng.random() < 0.6),
        "q_offset": _pick(rng, [None, None, 0, 5, -4, "near", "near", "vector", 1 << 39, -(1 << 39)]),
    }
    if rng.random() < 0.5:
        mask["window"] = (side(), side())
    if mask["q_offset"] == "near":
        mask["q_offset"] = int(rng.integers(-n[0] - 2, n[1] + 3))
    return mask


def _offsets(rng, n, sequences: int) -> np.ndarray:
    far = rng.random(sequences) < 0.1
    near = rng.integers(-n[0] - 2, n[1] + 3, sequences)
    return np.where(far, rng.choice([-(2**31), 2**31 - 1], sequences), near).astype(np.int32)


def _ends(rng, size: int, sequences: int) -> np.ndarray:
    """Ends of segments: of any sizes, often empty, with a tail that belongs to none in half of the cases."""
    ends = np.sort(rng.integers(0, size + 1, sequences))
    if sequences and rng.random() < 0.5:
        ends[-1] = size
    return np.array([0, *ends], np.int32)


def _valid(rng, size: int, batch: int) -> np.ndarray:
    return np.where(rng.random(batch) < 0.2, rng.choice([0, size], batch), rng.integers(0, size + 1, batch)).astype(np.int32)


def _in_layout(array: np.ndarray, layout: str) -> np.ndarray:
    axes = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (0, 2, 1, 3)}[layout]
    array = np.ascontiguousarray(array.transpose(axes))
    return array[0] if layout == "thd" else array


def _weight(rng, case: Case, whole: bool, place: Place):
    """`grad_kl`: none, a host number, a scalar or a row array on the device, of any float dtype and of sizes from 1e-9 to 1e6."""
    kind = _pick(rng, ["none", "number", "scalar"] if whole else ["none", "number", "scalar", "rows", "rows", "rows"])
    size = float(_pick(rng, [1.0, 1.0, 1.0, 1e-3, 1e-9, 1e6]))
    if kind == "none":
        return None
    if kind == "number":
        return _pick(rng, [size, -size, 0.0, np.float32(0.7 * size), 2])
    weight_dtype = NUMPY[_pick(rng, list(NUMPY))]
    if kind == "scalar":
        return np.asarray(np.clip(rng.normal() * size, -6e4, 6e4)).astype(weight_dtype).reshape(_pick(rng, [(), (1,)]))
    geometry = case.geometry()
    rows = rng.normal(size=geometry.row_shape) * size
    if rng.random() < 0.2:
        rows *= 10.0 ** rng.integers(-3, 1, geometry.row_shape)
    if place.how == "expanded":
        rows = equal_along(rows, place)
    elif rng.random() < 0.3:  # rows that see nothing may have any weight
        seen = np.zeros(geometry.row_shape, bool)
        for block in geometry.blocks():
            seen[block.rows] = block.visible.any(axis=1)
        rows = np.where(seen, rows, np.nan)
    return np.clip(rows, -6e4, 6e4).astype(weight_dtype) if weight_dtype == np.float16 else rows.astype(weight_dtype)
