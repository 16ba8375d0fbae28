"""Processes that compile and call at once, each with many threads, on one empty cache; and processes that are forked after the import."""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.gpu import cache

from ..backends import CuPyBackend
from ..oracle import SIDES, check_gradients, check_rows, make, truth

pytestmark = pytest.mark.gpu

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROCESSES, THREADS = 4, 6
IMPORT = "from tests.gpu import test_processes as t; "


def call(i: int) -> None:
    """One of three problems, which take kernels of their own, held to the reference."""
    backend = CuPyBackend()
    case = make(300 + i, ("float16", "bfloat16", "float32")[i % 3], n=(70, 90), d=(48, 80), causal=bool(i % 2))
    with backend.cupy.cuda.Stream(non_blocking=True) as stream:
        inputs = {name: backend.put(array) for name, array in case.arrays.items()}
        _, state = skl.forward(**inputs, **case.options)
        grads = skl.backward(state, wrt=SIDES)
        stream.synchronize()
        expected = truth(case, None, SIDES)
        check_rows(backend, case, state, expected)
        check_gradients(backend, case, grads, expected)


def call_in_threads() -> None:
    together, done = threading.Barrier(THREADS), []

    def work(i):
        together.wait()
        call(i)
        done.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(THREADS))


def call_in_forks() -> None:
    """The package is imported, with CuPy, and nothing called: children may call, and then this process too."""
    assert "cupy" in sys.modules
    children = []
    for i in range(2):
        child = os.fork()
        if child == 0:
            try:
                call(i)
                os._exit(0)
            except BaseException as error:
                print(f"in a fork: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    call(0)


def start(code: str, place) -> subprocess.Popen:
    environment = os.environ | {cache.VARIABLE: str(place)}
    return subprocess.Popen([sys.executable, "-c", IMPORT + code], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]


def test_many_at_once_on_an_empty_cache(device, tmp_path):
    for process in [start("t.call_in_threads()", tmp_path / "cache") for _ in range(PROCESSES)]:
        finish(process)
    left = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert left == {".json", ".cubin"}, "a temporary file was left behind"


@pytest.mark.parametrize("place", ["below a file", "read-only"])
def test_many_at_once_without_a_cache(device, tmp_path, place):
    """None can store what it compiles, and all of them run."""
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o555)
    if place == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    for process in [start("t.call_in_threads()", tmp_path / ("file/cache" if place == "below a file" else "locked")) for _ in range(2)]:
        finish(process)


def test_forks_after_the_import(device, tmp_path):
    finish(start("t.call_in_forks()", tmp_path / "cache"))


def test_a_process_that_only_plans_allocates_nothing(device):
    """`explain` and `workspace_size` launch nothing and take no device memory."""
    pool = device.cupy.get_default_memory_pool()
    inputs = [device.cupy.empty((1, 4, 64, 64), np.float16) for _ in SIDES]
    before = pool.used_bytes()
    skl.explain(*inputs, causal=True, wrt=SIDES)
    skl.workspace_size(*inputs, causal=True, wrt=SIDES)
    assert pool.used_bytes() == before
