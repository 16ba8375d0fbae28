"""Many callers at once: threads and processes, forked and spawned, on the CPU; `tests/gpu/test_processes.py` has a device."""

import multiprocessing
import os
import threading

import numpy as np
import pytest

import streamkl_cupy as skl

from .oracle import SIDES, make

CALLERS = 8


def case_of(i: int):
    """Problems of different shapes, dtypes and masks."""
    return make(
        200 + i,
        ("float32", "float16", "bfloat16")[i % 3],
        n=(20 + 7 * i, 50 - 3 * i),
        causal=bool(i % 2),
        reduction=("none", "mean")[i % 2],
    )


def results(i: int) -> list[bytes]:
    case = case_of(i)
    kl, state = skl.forward(**case.arrays, **case.options)
    return [np.asarray(a).tobytes() for a in (kl, *state.rows, *skl.backward(state, wrt=SIDES), *skl.merge([state.rows] * 2))]


def test_many_threads():
    """Each gets what it gets alone, to the bit, again and again."""
    alone, together, failed = [results(i) for i in range(CALLERS)], threading.Barrier(CALLERS), []

    def work(i):
        together.wait()
        failed.extend(i for _ in range(10) if results(i) != alone[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_threads_share_inputs_and_a_state():
    case = case_of(0)
    _, state = skl.forward(**case.arrays, **case.options)
    want, together, got = [g.tobytes() for g in skl.backward(state, wrt=SIDES)], threading.Barrier(CALLERS), []

    def work():
        together.wait()
        got.append([g.tobytes() for g in skl.backward(state, wrt=SIDES)])

    threads = [threading.Thread(target=work) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * CALLERS


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside threads is what this is about
def test_processes_after_the_import(how):
    """Forked or fresh, they get what this one gets, which has called before."""
    want = [results(i) for i in range(3)]
    with multiprocessing.get_context(how).Pool(3) as pool:
        assert pool.map_async(results, range(3)).get(timeout=120) == want


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_beside_threads_that_call():
    """A child that is forked in the middle of other threads' calls can call at once: nothing of the package is left locked."""
    want, go_on = results(1), threading.Event()

    def work():
        while not go_on.is_set():
            results(0)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                threading.Timer(60, os._exit, (3,)).start()
                try:
                    os._exit(0 if results(1) == want else 1)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
