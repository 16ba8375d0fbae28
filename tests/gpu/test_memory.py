"""Device memory: peaks at full size, calls that allocate nothing, workspaces to the byte; and a row of half a million keys."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.arrays import BFLOAT16

from ..oracle import SIDES, check_gradients, check_rows, make, nan_gradients, nan_state, row_weights, truth

pytestmark = pytest.mark.gpu

ROW_BYTES = 28
ROUNDING = 512 * 16
"""CuPy's pool gives memory in units of 512 bytes; a call makes a few allocations."""
PERIOD, DIM = 4099, 128
"""Big inputs repeat this many random rows: a prime, so that no tile size divides it."""


@pytest.fixture
def meter(device):
    """meter() -> a context that follows CuPy's pool: `now`, `peak`, and the `sizes` of all allocations."""

    class Meter(device.cupy.cuda.MemoryHook):
        name = "tests"

        def __init__(self):
            self.now, self.peak, self.sizes = 0, 0, []

        def malloc_postprocess(self, *, size, mem_size, mem_ptr, **_):
            if mem_ptr:
                self.sizes.append(size)
                self.now += mem_size
                self.peak = max(self.peak, self.now)

        def free_postprocess(self, *, mem_size, **_):
            self.now -= mem_size

    return Meter


@pytest.fixture(scope="module")
def bases():
    rng = np.random.default_rng(91)
    return {name: rng.normal(size=(PERIOD, DIM)).astype(np.float32).astype(BFLOAT16) for name in SIDES}


def big(device, bases, heads, rows):
    """Inputs of (1, heads, rows, DIM): row i of head h is base row (h * rows + i) % PERIOD."""
    cp = device.cupy
    at = cp.arange(heads * rows) % PERIOD
    return {n: device.put(a.view(np.uint16))[at].view(BFLOAT16).reshape(1, heads, rows, DIM) for n, a in bases.items()}


@pytest.fixture(scope="module")
def wide(device, bases):
    """B * H = 16, N = 65536, D = 128."""
    inputs = big(device, bases, 16, 65536)
    skl.warmup(**inputs, wrt=SIDES)
    device.synchronize()
    yield inputs
    inputs.clear()
    device.cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_peak_of_forward(device, wide, meter, causal):
    rows = 16 * 65536
    with meter() as seen:
        kl, state = skl.forward(**wide, causal=causal)
        device.synchronize()
    assert seen.peak - kl.nbytes <= ROW_BYTES * rows + ROUNDING, f"{seen.peak / rows:.1f} bytes a row with kl"
    assert np.isfinite(device.get(state.kl)).all()


@pytest.mark.parametrize("wrt", [("q2", "k2"), SIDES], ids=" ".join)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_peak_of_backward(device, wide, meter, wrt, deterministic):
    rows = 16 * 65536
    _, state = skl.forward(**wide, causal=True)
    with meter() as seen:
        grads = skl.backward(state, wrt=wrt, deterministic=deterministic)
        device.synchronize()
    outputs = sum(getattr(grads, n).nbytes for n in wrt)
    sums = 0 if deterministic else 4 * DIM * rows  # dQ of one side in float32, where it is taken together with dK
    assert seen.peak - outputs <= ROW_BYTES * rows + sums + ROUNDING, f"{(seen.peak - outputs) / rows:.1f} bytes a row beyond the gradients"
    for name in wrt:
        words = getattr(grads, name).view(np.uint16)
        assert int(((words & 0x7F80) == 0x7F80).sum()) == 0, f"d{name} is not finite"


def test_a_second_call_allocates_the_same(device, wide, meter):
    runs = []
    for _ in range(2):
        with meter() as seen:
            _, state = skl.forward(**wide, causal=True)
            grads = skl.backward(state)
            device.synchronize()
            del _, state, grads
        runs.append((seen.sizes, seen.peak, seen.now))
    assert runs[0] == runs[1] and runs[0][2] == 0


class LongRows:
    """The causal problem of half a million keys, row by row in float64: keys repeat, so they are counted."""

    def __init__(self, bases, rows):
        self.base = {n: a.astype(np.float64) for n, a in bases.items()}
        self.rows, self.scale = rows, DIM**-0.5

    def row(self, i):
        """log p1 and log p2 of one key of each kind, how many of the kind the row sees, lse1, lse2, kl."""
        counts = (i + 1) // PERIOD + (np.arange(PERIOD) < (i + 1) % PERIOD)
        log_p, lse = [], []
        for side in "12":
            s = self.scale * (self.base[f"k{side}"] @ self.base[f"q{side}"][i % PERIOD])
            top = s[counts > 0].max()
            lse.append(top + np.log((counts * np.exp(s - top)).sum()))
            log_p.append(s - lse[-1])
        kl = (counts * np.exp(log_p[0]) * (log_p[0] - log_p[1])).sum()
        return log_p[0], log_p[1], counts, lse[0], lse[1], kl

    def dq(self, i):
        log_p1, log_p2, counts, _, _, kl = self.row(i)
        p1, p2 = np.exp(log_p1), np.exp(log_p2)
        d1, d2 = counts * p1 * (log_p1 - log_p2 - kl), counts * (p2 - p1)
        return self.scale * (d1 @ self.base["k1"]), self.scale * (d2 @ self.base["k2"])

    def dk(self, j):
        """Of a key near the end, which few rows see."""
        dk1, dk2 = np.zeros(DIM), np.zeros(DIM)
        for i in range(j, self.rows):
            log_p1, log_p2, _, _, _, kl = self.row(i)
            p1, p2 = np.exp(log_p1[j % PERIOD]), np.exp(log_p2[j % PERIOD])
            dk1 += self.scale * p1 * (log_p1[j % PERIOD] - log_p2[j % PERIOD] - kl) * self.base["q1"][i % PERIOD]
            dk2 += self.scale * (p2 - p1) * self.base["q2"][i % PERIOD]
        return dk1, dk2


def test_half_a_million_rows_and_keys(device, bases, meter):
    rows, right = 512 * 1024, LongRows(bases, 512 * 1024)
    inputs = big(device, bases, 1, rows)
    skl.warmup(**inputs, causal=True, wrt=SIDES, dtype="float32")
    with meter() as seen:
        kl, state = skl.forward(**inputs, causal=True)
        device.synchronize()
    assert seen.peak - kl.nbytes <= ROW_BYTES * rows + ROUNDING
    grads = skl.backward(state, wrt=SIDES, dtype="float32")
    got = {n: device.get(getattr(state, n))[0, 0] for n in ("kl", "lse1", "lse2")}
    assert all(np.isfinite(values).all() for values in got.values()) and got["kl"].min() >= -5e-6
    grads = {n: device.get(getattr(grads, n))[0, 0] for n in SIDES}
    assert all(np.isfinite(values).all() for values in grads.values())
    for i in (0, 1, 127, 4100, 65535, 131072, 300007, rows - 129, rows - 1):
        _, _, _, lse1, lse2, row_kl = right.row(i)
        for name, value in (("kl", row_kl), ("lse1", lse1), ("lse2", lse2)):
            np.testing.assert_allclose(got[name][i], value, rtol=1e-5, atol=1e-5, err_msg=f"{name} of row {i}")
        for name, value in zip(("q1", "q2"), right.dq(i), strict=True):
            off, norm = np.linalg.norm(grads[name][i] - value), np.linalg.norm(value)
            assert off <= 0.02 * norm + 1e-5, f"d{name} of row {i} is off by {off:.2e} of {norm:.2e}"
    for j in (rows - 150, rows - 65, rows - 2):
        for name, value in zip(("k1", "k2"), right.dk(j), strict=True):
            off, norm = np.linalg.norm(grads[name][j] - value), np.linalg.norm(value)
            assert off <= 0.02 * norm + 1e-9, f"d{name} of key {j} is off by {off:.2e} of {norm:.2e}"


KINDS = {
    "plain": ("bfloat16", {"n": (150, 203)}),
    "float32": ("float32", {"n": (150, 203), "causal": True}),
    "mean": ("float16", {"n": (150, 203), "reduction": "mean"}),
    "split keys": ("bfloat16", {"batch": 1, "n": (5, 6000), "d": (128, 128)}),
    "split keys, mean": ("float16", {"batch": 1, "n": (5, 6000), "d": (64, 128), "reduction": "mean"}),
    "padded dimensions": ("float16", {"n": (37, 53), "d": (13, 20)}),
    "packed": ("bfloat16", {"layout": "thd", "n": (90, 70), "cu_seqlens_q": [0, 40, 90], "cu_seqlens_k": [0, 65, 70]}),
}


@pytest.fixture(params=list(KINDS))
def case(request):
    dtype, sizes = KINDS[request.param]
    return make(92, dtype, **sizes)


def arguments(device, case):
    return {n: device.put(v) if isinstance(v, np.ndarray) else v for n, v in (case.arrays | case.options).items()}


def test_with_out_and_workspace_nothing_is_allocated(device, meter, case):
    given = arguments(device, case)
    state, out = nan_state(device, case), nan_gradients(device, case)
    workspace = device.bytes(skl.workspace_size(**given, wrt=SIDES))
    skl.warmup(**given, wrt=SIDES)
    with meter() as seen:
        _, state = skl.forward(**given, out=state, workspace=workspace)
        grads = skl.backward(state, wrt=SIDES, out=out, workspace=workspace)
    assert seen.sizes == []
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)


def test_the_workspace_is_exact(device, case):
    """That many bytes are enough and no byte behind them is touched; with one less a call refuses."""
    given = arguments(device, case)
    size = skl.workspace_size(**given, wrt=SIDES)
    memory = device.bytes(size + 256)
    weights = None if case.options.get("reduction") else row_weights(case)
    put_weights = None if weights is None else device.put(weights)
    _, state = skl.forward(**given, out=nan_state(device, case), workspace=memory[:size])
    grads = skl.backward(state, put_weights, wrt=SIDES, out=nan_gradients(device, case), workspace=memory[:size])
    assert (device.get(memory)[size:] == 0xFF).all()
    expected = truth(case, weights, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)
    if size == 0:
        return
    less, refusals = memory[: size - 1], 0
    for dtype in (case.dtype, "float32"):
        for call in (
            lambda: skl.forward(**given, workspace=less),
            lambda dtype=dtype: skl.backward(state, wrt=SIDES, dtype=dtype, workspace=less),
        ):
            try:
                call()
            except ValueError as error:
                assert f"workspace has {size - 1} bytes; this call takes {size} " in str(error)
                refusals += 1
    assert refusals


def test_without_a_workspace_a_call_takes_no_more_than_it_says(device, meter, case):
    given = arguments(device, case)
    state, out = nan_state(device, case), nan_gradients(device, case)
    size = skl.workspace_size(**given, wrt=SIDES)
    skl.warmup(**given, wrt=SIDES)
    with meter() as seen:
        _, state = skl.forward(**given, out=state)
    assert seen.peak <= size + ROUNDING
    with meter() as seen:
        skl.backward(state, wrt=SIDES, out=out)
    assert seen.peak <= size + ROUNDING


@pytest.mark.parametrize("name", ["plain", "split keys, mean"])
def test_with_out_and_workspace_torch_allocates_nothing(device, torch_peer, name):
    torch, (dtype, sizes) = torch_peer.torch, KINDS[name]
    case = make(93, dtype, **sizes)
    given = {n: torch_peer.put(v) if isinstance(v, np.ndarray) else v for n, v in (case.arrays | case.options).items()}
    _, state = skl.forward(**given)
    grads = skl.backward(state, wrt=SIDES)
    workspace = torch_peer.put(np.zeros(skl.workspace_size(**given, wrt=SIDES), np.uint8))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    skl.forward(**given, out=state, workspace=workspace)
    skl.backward(state, wrt=SIDES, out=grads, workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_memory_stays_flat_over_many_steps(device):
    case = make(94, "bfloat16", n=(150, 203), causal=True)
    given, pool = arguments(device, case), device.cupy.get_default_memory_pool()
    used, held = set(), set()
    for step in range(500):
        _, state = skl.forward(**given)
        grads = skl.backward(state, wrt=SIDES)
        if step >= 100:
            used.add(pool.used_bytes())
            held.add(pool.total_bytes())
        del _, state, grads
    assert len(used) == len(held) == 1
