"""States that are saved, dropped, put together again, and merged out of any shards of the keys, on both backends."""

import dataclasses
import io
import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamkl_cupy as skl

from .oracle import DTYPES, SIDES, call_options, check_gradients, check_rows, make, put_weight, row_weights, run_forward, truth
from .problems import shard

SIZES = {"seqlens_k": [53, 0, 20], "causal": True}


def host_parts(backend, state) -> dict[str, np.ndarray]:
    return {name: backend.get(array) for name, array in state.rows._asdict().items()}


def through_pickle(backend, state):
    parts, problem = pickle.loads(pickle.dumps((host_parts(backend, state), state.problem)))
    return {name: backend.put(a) for name, a in parts.items()}, problem


def through_savez(backend, state):
    """Rows as arrays, the problem as text: nothing that wants pickle."""
    file = io.BytesIO()
    np.savez(file, **host_parts(backend, state), problem=np.array(repr(state.problem)))
    file.seek(0)
    with np.load(file, allow_pickle=False) as saved:
        problem = eval(str(saved["problem"]), {"Problem": skl.Problem})
        return {name: backend.put(saved[name]) for name in skl.RowStats._fields}, problem


def through_torch(backend, state):
    torch, file = pytest.importorskip("torch"), io.BytesIO()
    rows = {name: torch.from_numpy(a.copy()) for name, a in host_parts(backend, state).items()}
    torch.save({"rows": rows, "problem": dataclasses.asdict(state.problem)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    return {name: backend.put(t.numpy()) for name, t in saved["rows"].items()}, skl.Problem(**saved["problem"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("save", [through_pickle, through_savez, through_torch], ids=lambda f: f.__name__)
def test_a_state_is_rebuilt_from_what_was_saved(backend, save, reduction, dtype):
    """The inputs were saved too, and all else is gone: the same bits of every gradient."""
    case = make(21, dtype, **SIZES, reduction=reduction)
    weight = 0.5 if reduction == "mean" else row_weights(case)
    run = run_forward(backend, case)
    before = skl.backward(run.state, put_weight(backend, weight), wrt=SIDES, deterministic=True)
    before = [backend.get(g).tobytes() for g in before]
    parts, problem = save(backend, run.state)
    assert problem == run.state.problem
    del run
    vectors = {n: v for n, v in call_options(backend, case).items() if n in skl.Inputs._fields}
    inputs = skl.Inputs(**{n: backend.put(a) for n, a in case.arrays.items()}, **vectors)
    state = skl.KLState(skl.RowStats(**parts), problem, inputs)
    check_rows(backend, case, state, truth(case))
    grads = skl.backward(state, put_weight(backend, weight), wrt=SIDES, deterministic=True)
    assert [backend.get(g).tobytes() for g in grads] == before
    check_gradients(backend, case, grads, truth(case, weight, SIDES))


ELSEWHERE = """
import pickle, sys
import streamkl_cupy as skl
state = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(skl.backward(state, wrt=("q1", "k2"))))
"""


def test_another_process_goes_on():
    case = make(22, "bfloat16", **SIZES, reduction="sum")
    _, state = skl.forward(**case.arrays, **case.options)
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=pickle.dumps(state), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    there, here = pickle.loads(done.stdout), skl.backward(state, wrt=("q1", "k2"))
    assert [g.tobytes() for g in (there.q1, there.k2)] == [g.tobytes() for g in (here.q1, here.k2)]


def merged(rows, rng):
    """Merges in a random tree: any two at a time, or several."""
    rows = list(rows)
    while len(rows) > 1:
        rng.shuffle(rows)
        count = int(rng.integers(2, len(rows) + 1))
        rows = [skl.merge(rows[:count]), *rows[count:]]
    return skl.merge(rows)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    shards=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(["none", "sum", "mean"]),
)
def test_any_partition_in_any_order(backend, seed, shards, dtype, reduction):
    """Keys are dealt out to shards, some of which get none; their rows in any order make the whole, and their gradients add up."""
    rng = np.random.default_rng(seed)
    case = make(seed % 1000, dtype, batch=2, n=(19, 47), reduction=reduction)
    owner = rng.integers(0, shards, case.arrays["k1"].shape[2])
    parts = [np.flatnonzero(owner == i) for i in range(shards)]
    check_shards(backend, case, [case.with_arrays(**{n: case.arrays[n][:, :, at] for n in ("k1", "k2")}) for at in parts], parts, rng)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), shards=st.integers(1, 6), layout=st.sampled_from(["bhsd", "bshd", "thd"]))
def test_any_cuts_of_masked_and_packed_keys(backend, seed, shards, layout):
    """Runs of keys, under a mask, with lengths or segments of their own: many of them see nothing in some shard."""
    rng = np.random.default_rng(seed)
    ends = {f"cu_seqlens_{x}": [0, *np.sort(rng.integers(0, n + 1, 3))] for x, n in (("q", 19), ("k", 47))}
    lengths = {"seqlens_k": rng.integers(0, 48, 2), "seqlens_q": rng.integers(0, 20, 2)}
    case = make(seed % 1000, "float16", layout=layout, batch=2, n=(19, 47), causal=True, **(ends if layout == "thd" else lengths))
    cuts = [0, *np.sort(rng.integers(0, 48, shards - 1)), 47]
    parts = [np.arange(*cut) for cut in itertools.pairwise(cuts)]
    check_shards(backend, case, [shard(case, *cut) for cut in itertools.pairwise(cuts)], parts, rng)


def check_shards(backend, case, shards, keys, rng) -> None:
    """`keys` are those of each shard."""
    states = [run_forward(backend, one).state for one in shards]
    rows = merged([state.rows for state in states], rng)
    weight = row_weights(case) if case.options.get("reduction", "none") == "none" else 0.5
    expected = truth(case, weight, SIDES, "float32")
    check_rows(backend, case, run_forward(backend, case).state.with_rows(rows), expected)
    axis = 0 if case.options["layout"] == "thd" else 1 if case.options["layout"] == "bshd" else 2
    totals = {name: np.zeros(array.shape, np.float32) for name, array in case.arrays.items()}
    for state, at in zip(states, keys, strict=True):
        grads = skl.backward(state.with_rows(rows), put_weight(backend, weight), wrt=SIDES, dtype="float32")
        for name, total in totals.items():
            grad = backend.get(getattr(grads, name))
            if name[0] == "q":
                total += grad
            else:
                total[(slice(None),) * axis + (at,)] += grad
    check_gradients(Host, case, skl.Gradients(**totals), expected, f"in {len(shards)} shards")


class Host:
    """How sums that were made on the host are read."""

    @staticmethod
    def get(array):
        return array


@pytest.mark.parametrize("empties", [1, 3])
def test_empty_shards_are_neutral(backend, empties):
    """Shards without any key, and keys that no row sees: what the others made stays, in NumPy to the bit, and their gradients are 0."""
    case = make(23, "float16", **SIZES)
    state = run_forward(backend, case).state
    nothing = [shard(case, 53, 53), case.with_options(seqlens_k=np.zeros(3, np.int32)), case.with_options(q_offset=-1000)]
    others = [run_forward(backend, one).state for one in nothing[:empties]]
    alone = skl.merge([state.rows])
    for order in ([state, *others], [*others, state], [*others, state, *others]):
        rows = skl.merge([one.rows for one in order])
        for name in ("kl", "lse1", "lse2"):
            got, want = backend.get(getattr(rows, name)), backend.get(getattr(alone, name))
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 if backend.name == "cupy" else 0, err_msg=name)
        assert backend.name == "cupy" or [a.tobytes() for a in rows] == [a.tobytes() for a in alone]
    for one in others:
        grads = skl.backward(one.with_rows(rows), wrt=SIDES)
        assert not any(backend.get(g).any() for g in grads)
    only = skl.merge([one.rows for one in others])
    assert not backend.get(only.kl).any() and np.isneginf(backend.get(only.lse1)).all() and np.isneginf(backend.get(only.lse2)).all()
