"""What each command does: its grid of cases, the run over it, and what is printed at the end."""

from __future__ import annotations

import itertools
import sys

from . import paper, report
from .cases import FORMULAS, Case
from .data import input_bytes, make
from .peers import MODULES
from .progress import Progress
from .results import Results, adopt_tuned, load

K = 1024
DEFAULTS = {
    "cuda": {
        "heads": [16], "head_dim": [128], "dtype": ["bfloat16"], "seqlen_q": [4 * K, 16 * K],
        "memory": [4 * K, 16 * K, 64 * K], "few_q": [1, 16, 32, 64], "few_k": [64 * K, 128 * K, 256 * K, 512 * K], "host": [512],
    },
    "cpu": {
        "heads": [2], "head_dim": [64], "dtype": ["float32"], "seqlen_q": [256, 512],
        "memory": [256, 512], "few_q": [1, 16], "few_k": [4 * K], "host": [64],
    },
}  # fmt: skip
SETTINGS = [("q2", "k2"), ("q1", "k1")]


class Refused(Exception):
    """A request that cannot be met, in one line."""


def run(options, argv: list[str]) -> int:
    if options.command == "readme":
        from . import readme

        try:
            return readme.refresh(check=options.check)
        except ValueError as error:
            raise Refused(str(error)) from None
    _check_plot(options)
    if options.command == "show":
        return _show(options)
    if options.json is not None and not options.json.parent.is_dir():
        raise Refused(f"--json {options.json}: there is no folder {options.json.parent}")
    device, why_not = _device(options.device)
    if options.portable and device == "cuda":
        from .subject import use_portable_kernels

        use_portable_kernels()
    names = ("forward", "backward", "memory", "few-rows", "host") if options.command == "all" else (options.command,)
    grid = [(name, *cell) for name in names for cell in _cells(name, options, device)]
    if options.explain:
        return _explain(grid, device)
    if device == "cpu":
        print(f"No GPU in use ({why_not}): the NumPy backend, small defaults.", file=sys.stderr)
    results = Results(device, argv, options.json)
    _measure(grid, options, device, results)
    _print(results.document, options)
    bad = [row for row in results.rows if row["skipped"].get("streamkl", "").startswith(("wrong", "failed"))]
    return 1 if bad else 0


def _measure(grid, options, device, results) -> None:
    from . import host
    from .runner import Plan, Runner

    chosen = options.peers
    if chosen is None:
        chosen = tuple(name for name in MODULES if (name == "dense") == (device == "cpu"))
    if device == "cuda" and "triton" in chosen:
        adopt_tuned(results.document)
    plan = Plan(device, chosen, options.repeat, options.seconds_per_cell, options.sustained)
    with Progress(len(grid)) as progress:
        runner = None
        for name, direction, case in grid:
            progress.say(f"{name}: {case.label()} {'' if name == 'host' else direction}")
            if name == "host":
                results.add(host.measure(case, direction, device))
            else:
                if runner is None:
                    runner = Runner(plan, progress.say)
                    if device == "cuda" and runner.gemm is None:
                        progress.say(f"without the cuBLAS yardstick: {runner.gemm_missing}")
                results.add(runner.measure_memory(case, direction) if name == "memory" else runner.measure(case, direction, name))
            progress.advance()


def _cells(command: str, options, device: str):
    """(direction, case) of every cell; for `host`, (framework, case)."""
    defaults = DEFAULTS[device]
    given = options.seqlen_q if options.command == command or command in ("forward", "backward", "memory") else None
    given_k = options.seqlen_k if options.command == command or command in ("forward", "backward", "memory") else None
    fallback = {"memory": defaults["memory"], "few-rows": defaults["few_q"], "host": defaults["host"]}.get(command, defaults["seqlen_q"])
    lengths_k = given_k or (defaults["few_k"] if command == "few-rows" else None)
    lengths = [(q, k) for q in given or fallback for k in lengths_k or [q]]
    causal = options.causal or ("no" if command in ("few-rows", "host") else "both")
    masks = {"no": (False,), "yes": (True,), "both": (False, True)}[causal]
    settings = options.wrt or (SETTINGS if options.command == "all" else SETTINGS[:1])
    directions = {"forward": ("forward",), "backward": ("backward",), "host": (None,)}.get(command, ("forward", "backward"))
    if command == "host":
        from .host import FRAMEWORKS

        directions, settings = FRAMEWORKS[device], settings[:1]
    product = itertools.product(
        options.heads or defaults["heads"],
        options.head_dim or defaults["head_dim"],
        options.dtype or defaults["dtype"],
        directions,
        masks,
        lengths,
    )
    for heads, dim, dtype, direction, mask, (q, k) in product:
        for dim2 in options.head_dim2 or [dim]:
            for wrt in settings if direction == "backward" else settings[:1]:
                try:
                    yield (
                        direction,
                        Case(
                            q,
                            k,
                            options.batch,
                            heads,
                            options.kv_heads or heads,
                            dim,
                            dim2,
                            dtype,
                            mask,
                            options.window,
                            wrt,
                            options.deterministic,
                            options.portable,
                        ),
                    )
                except ValueError as error:
                    raise Refused(str(error)) from None


def _device(wanted: str) -> tuple[str, str]:
    """ "cuda" or "cpu", and why not cuda."""
    if wanted == "cpu":
        return "cpu", "--device cpu"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        return "cuda", ""
    except ImportError:
        reason = "CuPy is not installed"
    except Exception as error:
        reason = f"CuPy finds none: {str(error).splitlines()[0]}"
    if wanted == "cuda":
        raise Refused(f"--device cuda: {reason}")
    return "cpu", reason


def _explain(grid, device: str) -> int:
    from .subject import plan

    print(FORMULAS)
    for name, direction, case in grid:
        print(f"\n{name}, {direction}: {case.label()}, B*H {case.batch * case.heads}, {case.dtype}")
        if direction in ("forward", "backward"):
            print(f"  {case.pairs} pairs, {case.flop(direction)} useful operations, {report.size(case.traffic(direction))} to move")
        print(f"  inputs {report.size(input_bytes(case))}")
        for line in plan(case, make(case, device)):
            print(f"  {line}")
    return 0


def _show(options) -> int:
    try:
        documents = [load(path) for path in options.results]
    except ValueError as error:
        raise Refused(str(error)) from None
    for path, document in zip(options.results, documents, strict=True):
        if len(documents) > 1:
            print(f"{path}\n")
        _print(document, options, plot=False)
    if options.plot:
        _plot([row for document in documents for row in document["rows"]], documents[-1]["machine"], options.plot)
    return 0


def _print(document: dict, options, plot: bool = True) -> None:
    rows, machine = document["rows"], document["machine"]
    print(f"{machine['name']}, {document['run']['date']}; {', '.join(f'{name} {v}' for name, v in machine['versions'].items())}")
    print(report.table(rows))
    if rates := sorted(row["cublas"]["tflops"] for row in rows if "cublas" in row):
        print(f"cuBLAS 8192^3 bfloat16 in this run: {rates[0]:.0f} to {rates[-1]:.0f} TFLOP/s in bursts")
    for line in report.skipped(rows):
        print(f"skipped: {line}", file=sys.stderr)
    if options.compare_paper:
        title, header, lines = paper.comparison(rows, machine["name"])
        print(f"\n{title}")
        print(report.align(header, lines) if lines else "no published cell was measured: D 128, bfloat16, B*H 16 or 32, N 4k to 512k")
    if plot and options.plot:
        _plot(rows, machine, options.plot)


def _check_plot(options) -> None:
    if options.plot is None:
        return
    if not options.plot.parent.is_dir():
        raise Refused(f"--plot {options.plot}: there is no folder {options.plot.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Refused("--plot needs matplotlib: pip install 'streamkl-cupy[bench]', or `python -m bench show` elsewhere") from None


def _plot(rows, machine, path) -> None:
    from . import plots

    for written in plots.write(rows, machine, path):
        print(f"wrote {written}", file=sys.stderr)
