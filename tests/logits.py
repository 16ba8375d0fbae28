"""Logits as inputs, and small problems with known answers (cases/README.md)."""

import json
import pathlib

import numpy as np

from .problems import NUMPY, Case

CASES = json.loads((pathlib.Path(__file__).parent / "cases" / "open_cases.json").read_text())
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5}


def numbers(values) -> np.ndarray:
    return np.array(values, dtype=float)


def embed(s1, s2, dtype="float32", offset=(0, 0), **options) -> Case:
    """Logits (rows, keys) of both sides as inputs, a sequence for each row; -inf, which comes last, is a key beyond the row's
    length. `offset` (left, right): every logit of side 1 gets left * right on top, exactly."""
    s1, s2 = (np.atleast_2d(numbers(s)) for s in (s1, s2))
    arrays = {}
    for side, s in (("1", s1), ("2", s2)):
        q, k = np.zeros((len(s), 1, 1, 8)), np.zeros((len(s), 1, s.shape[1], 8))
        q[..., 0], k[:, 0, :, 0] = 1, s
        if side == "1":
            q[..., 1], k[..., 1] = offset
        arrays |= {f"q{side}": q.astype(NUMPY[dtype]), f"k{side}": k.astype(NUMPY[dtype])}
    options = {"scale1": 1.0, "scale2": 1.0} | options
    if not np.isfinite(s1).all():
        options["seqlens_k"] = np.isfinite(s1).sum(axis=1).astype(np.int32)
    return Case(arrays, options, "logits")
