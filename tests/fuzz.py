"""Problems of every kind, drawn from a fixed seed, against the dense float64 reference, on a GPU or on the CPU:

    python -m tests.fuzz --minutes 4 --workers 12       as many cases as that takes
    python -m tests.fuzz --cases 20000 --workers 12 --json bench/results/fuzz/CARD.json
    python -m tests.fuzz --seed 3 --case 1729           one of them again, with all that it is made of

A case that fails prints the command that runs it alone, and the run goes on; the exit status is 1 in the end. Case `i` of a seed
is the same whatever ran before it (`tests.fuzz_cases`); how one is called and checked is in `tests.fuzz_run`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import os
import pathlib
import platform
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import streamkl_cupy as skl

from . import fuzz_cases, fuzz_run, fuzz_workers
from .backends import CuPyBackend, NumPyBackend
from .problems import DTYPES, NUMPY

DEFAULT_CASES = 1000
BACKENDS = {"numpy": NumPyBackend, "cupy": CuPyBackend}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    name = args.backend if args.backend != "auto" else "cupy" if has_device() else "numpy"
    if args.case is not None:
        print(fuzz_cases.draw(args.seed, args.case))
        error = attempt(BACKENDS[name](), args.seed, args.case, trace=True)
        print(f"case {args.case} of seed {args.seed} on {name}: {error or 'passed'}")
        return int(bool(error))
    if name == "cupy":
        compile_ahead()
    begin, deadline = time.monotonic(), None if args.minutes is None else time.monotonic() + 60 * args.minutes
    count = args.cases if args.cases is not None else DEFAULT_CASES if deadline is None else None
    ran, failures = 0, []
    work = in_this_process(name, args.seed) if args.workers == 1 else fuzz_workers.attempts(name, args.seed, args.workers, count)
    for index, error in itertools.islice(work, count):
        ran += 1
        if error:
            failures.append(index)
            print(f"python -m tests.fuzz --seed {args.seed} --case {index} --backend {name}  # {error}", flush=True)
        if deadline is not None and time.monotonic() >= deadline:
            break
    work.close()
    minutes = (time.monotonic() - begin) / 60
    print(f"{ran} cases of seed {args.seed} on {name}, {len(failures)} failed, {minutes:.1f} minutes")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record(name, args.seed, ran, failures, minutes), indent=1) + "\n")
    return int(bool(failures))


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="stop after so many, compilation not counted")
    parser.add_argument("--cases", type=int, help=f"stop after so many ({DEFAULT_CASES} where no --minutes are given)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, metavar="I", help="run this one alone")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto")
    parser.add_argument("--workers", type=int, default=1, metavar="W", help="processes")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write what was run, on what, and what failed")
    args = parser.parse_args(argv)
    for option in ("minutes", "cases", "workers"):
        if getattr(args, option) is not None and getattr(args, option) <= 0:
            parser.error(f"--{option} takes a number above 0")
    return args


def attempt(backend, seed: int, index: int, *, trace: bool = False) -> str | None:
    """What is wrong with a case, in a line; None where nothing is."""
    try:
        fuzz_run.run(backend, fuzz_cases.draw(seed, index))
    except Exception as error:
        if trace:
            traceback.print_exc()
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def in_this_process(name: str, seed: int):
    backend = BACKENDS[name]()
    for index in itertools.count():
        yield index, attempt(backend, seed, index)


def has_device() -> bool:
    from streamkl_cupy.gpu.device import device_info

    try:
        device_info(0)
    except RuntimeError:
        return False
    return True


def compile_ahead() -> None:
    """Compiles all that the cases launch, on all cores: workers would each begin with the same kernels."""
    import cupy

    def warm(dtype, dims, heads_k, wrt):
        heads = {"q1": 4, "k1": heads_k, "q2": 4, "k2": 2}
        skl.warmup(*(cupy.empty((1, h, 1, dims[int(n[1]) - 1]), NUMPY[dtype]) for n, h in heads.items()), wrt=wrt)

    combinations = itertools.product(
        DTYPES, (*fuzz_cases.PAIRS, fuzz_cases.WIDE_PAIRS[0]), (1, 2), (("q1", "k1", "q2", "k2"), ("q1", "k1"), ("q2", "k2"))
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        collections.deque(pool.map(lambda c: warm(*c), combinations), maxlen=0)


def record(name: str, seed: int, ran: int, failures: list[int], minutes: float) -> dict:
    """The run, for a file of results."""
    machine = {"device": platform.machine(), "python": platform.python_version()}
    if name == "cupy":
        from .gpu_report import machine as gpu

        machine = gpu()
    machine |= {"numpy": np.__version__, "streamkl_cupy": skl.__version__}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    run = {"date": date, "backend": name, "seed": seed, "cases": ran, "failed": len(failures)}
    return {**machine, **run, "failed_cases": sorted(failures)[:100], "minutes": round(minutes, 2)}


if __name__ == "__main__":
    sys.exit(main())
