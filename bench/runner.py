"""Measures one case: the library, cuBLAS beside it, every peer against it, memory and errors. One row of results each."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from . import memory, peers, subject
from .accuracy import TOLERANCE, Checker
from .cases import Case
from .data import make
from .peers import Skip
from .timing import Copy, CpuClock, CudaClock, Gemm, interleaved, sustained

PATIENCE = 5
"""A peer's call may take this many times --seconds-per-cell, by extrapolation; a sustained measurement twice that."""


class Plan(NamedTuple):
    """What the command line asks of every cell."""

    device: str
    peers: tuple[str, ...]
    repeat: int
    seconds: float
    sustained: bool


class Runner:
    def __init__(self, plan: Plan, say):
        self.plan, self.say = plan, say
        self.clock = CudaClock() if plan.device == "cuda" else CpuClock()
        self.gemm = self.copy = None
        self.gemm_missing = Gemm.unavailable() if plan.device == "cuda" else "no GPU"
        if self.gemm_missing is None:
            self.gemm = Gemm(self.clock)
        self.modules, self.absent = {}, {}
        for name in plan.peers:
            module = peers.load(name)
            reason = f"it runs on {module.DEVICE}" if plan.device != module.DEVICE else module.available()
            if reason:
                self.absent[name] = reason
            else:
                self.modules[name] = module
        # Seconds a pair of each peer and kind of case, to foresee which cells are too slow.
        self.pace: dict[tuple, float] = {}

    def measure(self, case: Case, direction: str, command: str) -> dict:
        """A row: timings, speed-ups, memory and errors of everyone on this case, in "forward" or "backward"."""
        row = new_row(case, direction, command)
        row["skipped"] |= self.absent
        with self._absence(row, subject.NAME):
            self._measure(row, case, direction)
        return row

    def _measure(self, row, case, direction):
        data = make(case, self.plan.device)
        checker = Checker(case, data)
        ours = subject.Subject(case, data)
        call = getattr(ours, direction)
        first = call()
        errors = [checker.state_error(ours.state)]
        if direction == "backward":
            errors.append(checker.backward_error(first))
        del first
        calls, estimate = {subject.NAME: call}, {subject.NAME: self.clock.once(call)}
        if row["command"] == "few-rows":
            self.copy = self.copy or Copy(self.clock)
            calls["copy"], estimate["copy"] = self.copy.call, self.copy.estimate_ms
        elif self.gemm:
            calls["cublas"], estimate["cublas"] = self.gemm.call, self.gemm.estimate_ms
        times = interleaved(self.clock, calls, self.plan.seconds, self.plan.repeat, estimate)
        entry = {"error": errors[-1]} | timed(times[subject.NAME], case.flop(direction), case.traffic(direction))
        row["results"][subject.NAME] = entry
        if max(errors) > TOLERANCE[case.dtype]:
            row["skipped"][subject.NAME] = f"wrong: error {errors[0]:.1e} of the forward, {errors[-1]:.1e} of the {direction}"
        if "copy" in times:
            row["copy"] = {"gbps": self.copy.bytes / times["copy"].median / 1e6}
        if "cublas" in times:
            row["cublas"] = {"tflops": self.gemm.flop / times["cublas"].median / 1e9}
            entry["of_cublas"] = entry["tflops"] / row["cublas"]["tflops"]
        for name, module in self.modules.items():
            with self._absence(row, name):
                self._peer(row, name, module, case, data, direction, checker, call, entry["ms"])
        # Few rows are bound by memory: the ratio would say nothing there.
        settled = 4 * max(entry["ms"] / 1e3, 0.5) < 2 * PATIENCE * self.plan.seconds and row["command"] != "few-rows"
        if self.gemm and self.plan.sustained and settled:
            rates = sustained(self.clock, call, case.flop(direction), entry["ms"], self.gemm)
            row["sustained"] = {"ratio": rates.ratio, "kernel_tflops": rates.kernel, "cublas_tflops": rates.cublas}
        ours.state = None
        entry["extra_bytes"] = self._extra_bytes(subject, case, data, direction)

    def measure_memory(self, case: Case, direction: str) -> dict:
        """A row that holds the peak extra memory alone."""
        row = new_row(case, direction, "memory")
        row["skipped"] |= self.absent
        self._release()
        data = make(case, self.plan.device)
        for name, module in {subject.NAME: subject, **self.modules}.items():
            with self._absence(row, name):
                self._foresee(name, case, direction)
                # The first call may compile and tune; what that allocates is no part of the method.
                warm = module.prepare(case, data)
                ms = self.clock.once(getattr(warm, direction))
                self._remember(name, case, direction, ms)
                del warm
                row["results"][name] = {"extra_bytes": self._extra_bytes(module, case, data, direction)}
        return row

    def _peer(self, row, name, module, case, data, direction, checker, ours, ours_ms):
        self._foresee(name, case, direction)
        self.say(f"{case.label()} {direction}: {name}")
        prepared = module.prepare(case, data)
        call = getattr(prepared, direction)
        error = self._check(module, prepared, direction, checker, case)
        estimate = {subject.NAME: ours_ms, name: self.clock.once(call)}
        self._remember(name, case, direction, estimate[name])
        times = interleaved(self.clock, {subject.NAME: ours, name: call}, self.plan.seconds, self.plan.repeat, estimate)
        flop = module.flop(case, direction) if module.COMPANION else case.flop(direction)
        entry = {"error": error} | timed(times[name], flop, None if module.COMPANION else case.traffic(direction))
        if not module.COMPANION:
            entry["speedup"] = times[name].median / times[subject.NAME].median
        if note := prepared.note():
            entry["note"] = note
        del prepared, call
        entry["extra_bytes"] = self._extra_bytes(module, case, data, direction)
        row["results"][name] = entry

    def _check(self, module, prepared, direction, checker, case) -> float | None:
        if module.COMPANION:
            error = checker.attention_error(prepared.forward())
            if direction == "backward":
                prepared.backward()
        elif direction == "forward":
            error = checker.forward_error(prepared.forward())
        else:
            error = checker.backward_error(prepared.backward())
        if not error <= TOLERANCE[case.dtype]:
            raise Skip(f"wrong: error {error:.1e} against float64")
        return error

    def _extra_bytes(self, module, case, data, direction) -> int:
        """The peak of a fresh preparation and one call: a backward's includes the forward state that it keeps."""
        self._release()
        return memory.peak_extra_bytes(lambda: _fresh(module, case, data, direction), self.plan.device)

    def _pace_key(self, name, case, direction):
        return (name, direction, case.masked, case.wrt, case.head_dim1, case.dtype, case.seqlen_q <= 64)

    def _remember(self, name, case, direction, ms):
        self.pace[self._pace_key(name, case, direction)] = ms / 1e3 / max(case.pairs, 1)

    def _foresee(self, name, case, direction):
        seconds = self.pace.get(self._pace_key(name, case, direction), 0.0) * case.pairs
        if name != subject.NAME and seconds > PATIENCE * self.plan.seconds:
            raise Skip(f"a call would take about {seconds:.0f} s; raise --seconds-per-cell to have it")

    @contextlib.contextmanager
    def _absence(self, row, name):
        """Turns what keeps a contender from this case into its reason; the run goes on."""
        self._release()
        try:
            yield
        except Skip as reason:
            row["skipped"][name] = str(reason)
        except Exception as error:
            text = (str(error) or "no message").splitlines()[0]
            row["skipped"][name] = "out of memory" if memory.out_of_memory(error) else f"failed: {type(error).__name__}: {text[:120]}"

    def _release(self):
        if self.plan.device == "cuda":
            memory.release()


def new_row(case: Case, direction: str, command: str) -> dict:
    return {
        "command": command,
        "direction": direction,
        "case": case.to_json(),
        "pairs": case.pairs,
        "flop": case.flop(direction),
        "bytes": case.traffic(direction),
        "results": {},
        "skipped": {},
    }


def timed(times, flop, traffic) -> dict:
    fields = {"ms": times.median, "spread": times.spread, "calls": len(times.calls), "tflops": flop / times.median / 1e9}
    return fields if traffic is None else fields | {"gbps": traffic / times.median / 1e6}


def _fresh(module, case, data, direction):
    prepared = module.prepare(case, data)
    return prepared, getattr(prepared, direction)()
