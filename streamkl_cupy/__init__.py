"""KL divergence between two attention distributions, in one streaming pass and O(rows) extra memory.

>>> import numpy as np
>>> import streamkl_cupy as skl
>>> rng = np.random.default_rng(0)
>>> q1, k1, q2, k2 = (rng.normal(size=(1, 2, 5, 16)).astype(np.float32) for _ in range(4))
>>> kl, state = skl.forward(q1, k1, q2, k2, causal=True)
>>> grads = skl.backward(state)
>>> kl.shape, grads.q2.shape
((1, 2, 5), (1, 2, 5, 16))

Importing this package touches no CUDA state.
"""

from ._version import __version__
from .api import backward, explain, forward, merge, warmup, workspace_size
from .problem import Problem
from .state import Gradients, Inputs, KLState, RowStats

__all__ = [
    "Gradients",
    "Inputs",
    "KLState",
    "Problem",
    "RowStats",
    "__version__",
    "backward",
    "explain",
    "forward",
    "merge",
    "warmup",
    "workspace_size",
]
