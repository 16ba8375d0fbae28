"""Fuzzed cases over several processes. One that dies, or hangs in a kernel, fails its case and is replaced."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing import connection

HUNG_SECONDS = 300
"""A case takes a tenth of a second; a first one compiles what nobody compiled ahead."""
DEVICE_ERRORS = ("CUDARuntimeError", "CUDADriverError")


def work(name: str, seed: int, first: int, step: int, end: int | None, pipe) -> None:
    """Every `step`-th case from `first` on: says its index before it, and index and error after it."""
    from . import fuzz

    backend, index = fuzz.BACKENDS[name](), first
    try:
        while end is None or index < end:
            pipe.send(index)
            error = fuzz.attempt(backend, seed, index)
            pipe.send((index, error))
            if error and error.startswith(DEVICE_ERRORS):
                return  # nothing more can be run in this process
            index += step
    except (BrokenPipeError, KeyboardInterrupt):
        pass


class Worker:
    """A process that takes every `step`-th case."""

    def __init__(self, name: str, seed: int, first: int, step: int, end: int | None):
        self.arguments, self.next, self.since = (name, seed, step, end), first, time.monotonic()
        context = multiprocessing.get_context("spawn")  # a process that used CUDA cannot be forked
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(name, seed, first, step, end, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def over(self) -> bool:
        end = self.arguments[3]
        return end is not None and self.next >= end

    def again(self) -> Worker:
        name, seed, step, end = self.arguments
        return Worker(name, seed, self.next, step, end)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def attempts(name: str, seed: int, workers: int, end: int | None) -> Iterator[tuple[int, str | None]]:
    """Index and error of each case as it ends, in no order. Closing the iterator stops the processes."""
    # One thread of linear algebra a process: they have the cores among them.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    running = {w.pipe: w for w in (Worker(name, seed, first, workers, end) for first in range(workers))}
    try:
        while running:
            for pipe in connection.wait(list(running), timeout=1):
                worker, problem = running[pipe], None
                try:
                    said = pipe.recv()
                except EOFError:
                    worker.process.join()
                    problem = f"the process ended with status {worker.process.exitcode}"
                else:
                    worker.since = time.monotonic()
                    if isinstance(said, tuple):
                        worker.next = said[0] + workers
                        yield said
                    continue
                yield from replace(running, worker, problem)
            for worker in [w for w in running.values() if time.monotonic() - w.since > HUNG_SECONDS]:
                yield from replace(running, worker, f"no answer in {HUNG_SECONDS} seconds")
    finally:
        for worker in running.values():
            worker.stop()


def replace(running, worker: Worker, problem: str) -> Iterator[tuple[int, str]]:
    """Takes a worker that is done or dead out, and puts one in that goes on behind the case that it had."""
    del running[worker.pipe]
    clean = worker.process.exitcode == 0
    worker.stop()
    if not clean:
        index = worker.next
        worker.next += worker.arguments[2]
        yield index, problem
    if not worker.over:
        fresh = worker.again()
        running[fresh.pipe] = fresh
