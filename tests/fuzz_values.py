"""Numbers for a fuzzed problem, harmless and adversarial. All arrays are (B, H, N, D) here, whatever the layout will be."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from streamkl_cupy.checks import SIDES

from .problems import NUMPY

SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
OFFSETS = ((1, 1), (16, 8), (32, 32), (96, 104), (248, 256), (496, 496))
"""Exact in every dtype; their products, up to 246016, leave float32 five bits behind the point."""


@dataclass
class Values:
    """Inputs with what they ask of the call: scales by side (none: the default), gradients that can be asked for, their dtype.

    `exact` says that float32 holds every logit exactly, `identical` that both sides are the same numbers.
    """

    arrays: dict[str, np.ndarray]
    scales: dict[str, float] = field(default_factory=dict)
    wrt: tuple[str, ...] = SIDES
    wide: bool = False
    exact: bool = False
    identical: bool = False


def fill(rng: np.random.Generator, kind: str, shapes: dict[str, tuple[int, ...]], dtype: str) -> Values:
    """Inputs of a kind out of KINDS; `identical sides` and `converged student` take sides of equal shapes."""
    values = KINDS[kind](rng, shapes, dtype)
    values.arrays = {name: array.astype(NUMPY[dtype]) for name, array in values.arrays.items()}
    return values


def _normals(rng, shapes) -> dict[str, np.ndarray]:
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _normal(rng, shapes, dtype) -> Values:
    size = rng.choice([0.3, 1.0, 2.0])
    return Values({name: array * np.float32(size) for name, array in _normals(rng, shapes).items()})


def _logit_sizes(rng, shapes, dtype) -> Values:
    """Logits of 1e-3 to 1e4, on the two sides alike or not."""
    sizes = 10 ** rng.uniform(-3, 4, 2)
    if rng.random() < 0.5:
        sizes[1] = sizes[0]
    return Values(_normals(rng, shapes), {s: float(sizes[int(s) - 1] * shapes[f"q{s}"][-1] ** -0.5) for s in "12"})


def _offsets(rng, shapes, dtype) -> Values:
    """A common offset of a row's logits in one coordinate; the rest are multiples of 2^-5. The scale is 1."""
    arrays = {}
    for name, shape in shapes.items():
        step = 0.25 if name[0] == "q" else 0.125
        arrays[name] = np.clip(np.round(rng.normal(size=shape) * 2), -4, 4) * step
    for side in "12":
        left, right = OFFSETS[rng.integers(len(OFFSETS))]
        at = rng.integers(shapes[f"q{side}"][-1])
        arrays[f"q{side}"][..., at], arrays[f"k{side}"][..., at] = left * rng.choice([-1, 1]), right
    return Values(arrays, {"1": 1.0, "2": 1.0}, exact=True)


def _denormal_entries(rng, shapes, dtype) -> Values:
    """Normal numbers with denormals, zeros of both signs and the smallest number strewn in."""
    arrays = _normals(rng, shapes)
    for name, array in arrays.items():
        small = rng.integers(-64, 65, array.shape) * SMALLEST[dtype] * rng.choice([1.0, -0.0, 1.0], array.shape)
        arrays[name] = np.where(rng.random(array.shape) < 0.3, small, array).astype(np.float32)
    return Values(arrays)


def _denormal_queries(rng, shapes, dtype) -> Values:
    """Denormals times large numbers: logits of usual size. A gradient for the queries would be beyond the dtype, or float32."""
    arrays = _normals(rng, shapes)
    small, large = (2.0**-22, 2.0**12) if dtype == "float16" else (2.0**-130, 2.0**112)
    arrays = {name: array * np.float32(small if name[0] == "q" else large) for name, array in arrays.items()}
    scale = float(2.0 ** (10 if dtype == "float16" else 18))
    scales = {side: scale * shapes[f"q{side}"][-1] ** -0.5 for side in "12"}
    return Values(arrays, scales, wrt=SIDES if dtype == "float16" else ("k1", "k2"), wide=True)


def _large_products(rng, shapes, dtype) -> Values:
    """Dot products far beyond 65504, the largest of float16."""
    sizes = {name: float(rng.uniform(100, 4000)) for name in shapes}
    arrays = {name: np.clip(array * np.float32(sizes[name]), -6e4, 6e4) for name, array in _normals(rng, shapes).items()}
    scales = {s: float(rng.uniform(0.5, 8) / (sizes[f"q{s}"] * sizes[f"k{s}"] * shapes[f"q{s}"][-1] ** 0.5)) for s in "12"}
    return Values(arrays, scales)


def _identical(rng, shapes, dtype) -> Values:
    first = {name: array * np.float32(rng.choice([0.3, 1.0, 3.0])) for name, array in _normals(rng, shapes).items()}
    scale = float(10 ** rng.uniform(-2, 1))
    same = {f"{x}{side}": first[f"{x}1"] for x in "qk" for side in "12"}
    return Values(same, {"1": scale, "2": scale}, identical=True)


def _converged(rng, shapes, dtype) -> Values:
    """A student within some ulps of the teacher."""
    arrays = _normals(rng, shapes)
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-16}[dtype]
    for x in "qk":
        arrays[f"{x}2"] = arrays[f"{x}1"] * (1 + np.float32(ulp) * rng.integers(-2, 3, shapes[f"{x}1"])).astype(np.float32)
    return Values(arrays)


def _one_hot(rng, shapes, dtype) -> Values:
    """Every query is one of the keys, all of them vectors of signs: with large scales its row of P has a single 1."""
    arrays = {}
    targets = rng.integers(0, max(shapes["k1"][2], 1), shapes["q1"][2])
    for side in "12":
        k = rng.choice([-1.0, 1.0], shapes[f"k{side}"])
        at = targets if side == "1" or rng.random() < 0.5 else rng.permutation(targets)
        group = shapes["q1"][1] // k.shape[1]
        q = np.repeat(k[:, :, at] if k.shape[2] else np.ones((*k.shape[:2], len(at), k.shape[3])), group, axis=1)
        arrays |= {f"q{side}": q, f"k{side}": k}
    sizes = rng.choice([5.0, 50.0, 1e3, 1e4], 2)
    return Values(arrays, {side: float(sizes[int(side) - 1] / shapes[f"q{side}"][-1]) for side in "12"})


def _all_equal(rng, shapes, dtype) -> Values:
    """On one side or both all keys are the same, or all queries 0: P is uniform over what a row sees."""
    arrays = _normals(rng, shapes)
    for side in {"1": "1", "2": "2", "both": "12"}[str(rng.choice(["1", "2", "both"]))]:
        if rng.random() < 0.5:
            arrays[f"q{side}"][...] = 0
        else:
            arrays[f"k{side}"][...] = arrays[f"k{side}"][:, :, :1] * np.float32(rng.choice([1.0, 30.0]))
    return Values(arrays)


KINDS = {
    "normal": _normal,
    "logits of 1e-3 to 1e4": _logit_sizes,
    "common offsets": _offsets,
    "denormal entries": _denormal_entries,
    "denormal queries": _denormal_queries,
    "products beyond float16": _large_products,
    "identical sides": _identical,
    "converged student": _converged,
    "one-hot rows": _one_hot,
    "all-equal rows": _all_equal,
}
PAIRED = ("identical sides", "converged student")
"""Kinds whose sides have equal shapes."""
