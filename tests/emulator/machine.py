"""A device of the emulator, and checks of whole calls on it against the reference."""

from __future__ import annotations

import ctypes

import numpy as np

from streamkl_cupy import reference
from streamkl_cupy.arrays import BFLOAT16, view
from streamkl_cupy.checks import SIDES
from streamkl_cupy.gpu import backward, forward, merge, parameters, tensor_map
from streamkl_cupy.gpu.device import DeviceInfo
from streamkl_cupy.problem import Problem

from . import Emulated, tensor_maps

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32)}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 5e-6}
AMPERE = DeviceInfo("an emulated Ampere", (8, 0), "sm_80", 4, 163 << 10, 164 << 10)
HOPPER = DeviceInfo("an emulated Hopper", (9, 0), "sm_90", 4, 227 << 10, 228 << 10)
SMALL = DeviceInfo("an emulated part with 99 KB", (8, 6), "sm_86", 4, 99 << 10, 100 << 10)


class Machine:
    """Stands for the GPU: takes launches as `gpu.launch.launch` does, and runs them at once."""

    def __init__(self, info):
        self.info, self.memory, self.launched = info, [], []

    def install(self, monkeypatch):
        """Puts itself in the place of what launches, of the device's properties, and of the driver's tensor maps."""
        for module in (forward, backward, merge):
            for name in ("kernel", "plain_kernel", "launch", "zero"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))
            if hasattr(module, "device_info"):
                monkeypatch.setattr(module, "device_info", lambda index: self.info)
        monkeypatch.setattr(tensor_map, "_map", tensor_maps.encode)
        forward.plan.cache_clear()
        backward.plan.cache_clear()

    def kernel(self, spec, device_index):
        return Emulated(spec.source, spec.entry, dict(spec.defines))

    def plain_kernel(self, source, entry, device_index):
        return Emulated(source, entry)

    def launch(self, function, grid, threads, args, stream, shared_bytes=0):
        report = function.launch(grid, threads, args, shared_bytes, self.memory)
        assert report.bank_conflicts == 0, function.entry
        self.launched.append(function.entry)

    def zero(self, pointer, size, stream):
        ctypes.memset(pointer, 0, size)

    def allocate(self, count):
        self.scratch = np.full(count, 0xFF, np.uint8)
        return view("scratch", self.scratch)


def views(arrays):
    return {name: view(name, array) for name, array in arrays.items()}


def nan_rows(problem):
    return {name: np.full(problem.row_shape, np.nan, np.float32) for name in parameters.ROW_STATS.names}


def check_kl(rows, arrays, options):
    right = reference.forward(**arrays, **options)
    for name, got in (
        ("kl", rows["kl"]),
        *((f"lse{t}", (rows[f"ref{t}"].astype(np.float64) + rows[f"logsum{t}"]) * np.log(2)) for t in "12"),
    ):
        np.testing.assert_allclose(got, getattr(right, name), rtol=1e-5, atol=1e-5, err_msg=name)
    return right


def unseen(name, arrays, options):
    """Which rows of an input see no key, or which keys no row sees."""
    marks = np.ones(arrays[name].shape, bool)
    for block in reference._Case(**arrays, **options).blocks():
        marks[block.at[name]] &= ~block.visible.any(axis=1 if name[0] == "q" else 0)[:, None]
    return marks


def run(machine, arrays, wrt=SIDES, weights=None, as_float32=True, deterministic=True, **options):
    """Forward and the wanted gradients against the reference. The options are those of the public `forward`."""
    given = views(arrays | {name: v for name, v in options.items() if isinstance(v, np.ndarray)})
    problem = Problem.check(*(given[n] for n in SIDES), **{n: given.get(n, v) for n, v in options.items()})
    machine.memory = [arrays[n] for n in SIDES]
    rows = nan_rows(problem)
    reduced = None
    if problem.reduction != "none":
        scalars = [np.full((), np.nan, np.float32) for _ in range(2)]
        reduced = tuple(view("reduced", a) for a in scalars)
    forward.run(problem, given, views(rows), reduced, None, 0, allocate=machine.allocate)
    right = check_kl(rows, arrays, options)
    if reduced:
        np.testing.assert_allclose(scalars[0], right.reduced(problem.reduction), rtol=1e-5, atol=1e-5)

    dtype = arrays["q1"].dtype
    grads = {n: np.full(arrays[n].shape, np.nan, np.float32 if as_float32 else dtype) for n in wrt}
    given_weights = view("grad_kl", weights) if isinstance(weights, np.ndarray) else weights
    backward.run(problem, given, views(rows), given_weights, reduced, views(grads), deterministic, None, 0, allocate=machine.allocate)
    exact = reference.backward(**arrays, grad_kl=weights, wrt=wrt, **options)
    for name in wrt:
        got, want = grads[name].astype(np.float64), getattr(exact, name)
        norm = np.linalg.norm(want)
        assert norm > 0 and np.linalg.norm(got - want) <= 2 * ROUNDING[dtype.name] * norm, f"d{name}"
        assert not got[unseen(name, arrays, options)].any(), f"d{name} is not 0 where nothing is seen"


def inputs(dtype, layout, heads=(4, 2, 1), n=(37, 113), d=(64, 24), batch=2, seed=0):
    """Normal values; every size differs from every other one."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in SIDES:
        count = heads[0] if name[0] == "q" else heads[int(name[1])]
        sizes = {"b": batch, "h": count, "s": n["qk".index(name[0])], "d": d[int(name[1]) - 1], "t": n["qk".index(name[0])]}
        arrays[name] = rng.normal(size=[sizes[axis] for axis in layout]).astype(DTYPES[dtype])
    return arrays


def ints(*values):
    return np.array(values, np.int32)
