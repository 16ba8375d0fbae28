"""Figures from result rows: TFLOP/s and speed-up against N, memory against N, bandwidth of few rows. One figure a kind.

They stand on white, so that they can be read on a page of any colour. An SVG says in its metadata from which rows it was drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from .cases import Case, show_size
from .cells import TIMED, peers_of

COLOURS = {
    "streamkl": "#c1272d",
    "triton": "#0b66a5",
    "compile": "#3f9b5c",
    "torch": "#8a6bb1",
    "chunked": "#d38b1e",
    "fla": "#5fb4c9",
    "cupy": "#a0784f",
    "dense": "#8a6bb1",
    "cudnn": "#8c8c8c",
}
NAMES = {
    "streamkl": "streamkl_cupy",
    "triton": "Triton, the paper's kernels",
    "compile": "torch.compile",
    "torch": "PyTorch",
    "chunked": "PyTorch in chunks",
    "fla": "FLA fused KL",
    "cupy": "CuPy unfused",
    "dense": "NumPy dense",
    "cudnn": "cuDNN attention (companion)",
}
QUIET = "#bbbbbb"


def write(rows: list[dict], machine: dict, path: Path) -> list[Path]:
    """Draws every kind of figure that the rows give, and returns the files: `path` for one kind, else a suffix for each."""
    drawn = {kind: some for kind in FIGURES if (some := alike(rows_of(rows, kind)))}
    files = []
    for kind, some in drawn.items():
        files.append(path if len(drawn) == 1 else path.with_name(f"{path.stem}-{kind}{path.suffix}"))
        save(kind, some, machine, files[-1])
    return files


def rows_of(rows: list[dict], kind: str) -> list[dict]:
    """The rows that a kind of figure shows."""
    return [row for row in rows if row["command"] in FIGURES[kind][0]]


def save(kind: str, rows: list[dict], machine: dict, path: Path) -> None:
    with _defaults():
        figure = FIGURES[kind][1](rows, machine)
        own = {"Date": None, "Creator": "python -m bench", "Description": digest(kind, rows, machine)} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=160, metadata=own)


def digest(kind: str, rows: list[dict], machine: dict) -> str:
    """What a figure's SVG says of the results that it was drawn from."""
    text = json.dumps([kind, machine["name"], machine.get("memory_bytes"), rows], sort_keys=True)
    return f"rows sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def alike(rows: list[dict]) -> list[dict]:
    """Rows that share B * H, head dimensions, dtype and key heads: the combination with the most."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        case = Case.from_json(row["case"])
        shared = (case.batch * case.heads, case.kv_heads, case.head_dim1, case.head_dim2, case.dtype)
        groups.setdefault(shared, []).append(row)
    return max(groups.values(), key=len) if groups else []


def _rates(rows: list[dict], machine: dict):
    """TFLOP/s of everyone: a panel for each mask (down) and pass (across)."""
    figure, panels = _grid(rows)
    names = ("streamkl", *peers_of(rows))
    for axis, title, part in panels:
        for name in names:
            _line(axis, part, name, lambda row, name=name: row["results"][name].get("tflops"))
        if peak := [row["cublas"]["tflops"] for row in part if "cublas" in row]:
            _level(axis, sum(peak) / len(peak), "cuBLAS 8192³")
        axis.set_ylim(bottom=0)
        _label(axis, part, title, "TFLOP/s, useful arithmetic")
    return _finish(figure, rows, machine, names)


def _gains(rows: list[dict], machine: dict):
    """Speed-up of the library over each peer, in the same panels."""
    figure, panels = _grid(rows)
    names = [name for name in peers_of(rows) if name != "cudnn"]
    for axis, title, part in panels:
        for name in names:
            _line(axis, part, name, lambda row, name=name: row["results"][name].get("speedup"))
        axis.axhline(1, color=QUIET, lw=1, ls="--")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}x")
        _label(axis, part, title, "times faster than the peer")
    return _finish(figure, rows, machine, names)


def _memory(rows: list[dict], machine: dict):
    """A panel for each pass, of one mask; crosses above the card's capacity where a contender ran out of memory."""
    mask = Case.from_json(rows[0]["case"]).mask_label()
    rows = [row for row in rows if Case.from_json(row["case"]).mask_label() == mask]
    figure, panels = _grid(rows)
    names = ["streamkl", *peers_of(rows)]
    capacity = machine.get("memory_bytes")
    for axis, title, part in panels:
        for name in names:
            _line(axis, part, name, lambda row, name=name: row["results"][name].get("extra_bytes"))
        if capacity:
            failures = [name for name in names if any(_too_large(row, name) for row in part)]
            for place, name in enumerate(failures):
                at = [Case.from_json(row["case"]).seqlen_k for row in part if _too_large(row, name)]
                axis.plot(at, [capacity * 2.0 ** (place + 1)] * len(at), "x", color=COLOURS.get(name, "black"), ms=7, mew=2)
            note = f"card: {capacity / 2**30:.0f} GiB" + (", crosses: out of memory" if failures else "")
            _level(axis, capacity, note, ha="left")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_locator(_powers(*axis.get_ylim()))
        axis.yaxis.set_major_formatter(lambda y, _: _short(y))
        _label(axis, part, title, "peak extra memory")
    return _finish(figure, rows, machine, names)


def _few_rows(rows: list[dict], machine: dict):
    """A panel for each pass: GB/s against N_K, one shade a row count, the Triton peer dashed, the copy rate above."""
    figure, panels = _grid(rows)
    counts = sorted({Case.from_json(row["case"]).seqlen_q for row in rows})
    for axis, title, part in panels:
        for place, count in enumerate(counts):
            some = [row for row in part if Case.from_json(row["case"]).seqlen_q == count]
            for name, style in (("streamkl", "-"), ("triton", "--")):
                shade = _shade(COLOURS[name], 1 - 0.75 * place / max(len(counts), 1))
                label = f"{'streamkl_cupy' if name == 'streamkl' else 'Triton'}, N_Q {count}"
                _line(axis, some, name, lambda row, name=name: row["results"][name].get("gbps"), color=shade, ls=style, label=label)
        if rates := [row["copy"]["gbps"] for row in part if "copy" in row]:
            _level(axis, sum(rates) / len(rates), "copy in the same run")
        axis.set_ylim(bottom=0)
        _label(axis, part, title, "GB/s", "N_K")
    return _finish(figure, rows, machine, None)


FIGURES: dict[str, tuple[tuple[str, ...], Callable]] = {
    "tflops": (TIMED, _rates),
    "speedup": (TIMED, _gains),
    "memory": (("memory",), _memory),
    "few-rows": (("few-rows",), _few_rows),
}
"""The commands whose rows a kind of figure shows, and how it is drawn."""


def _grid(rows: list[dict]):
    """A figure with a panel for each mask (down) and pass (across): the figure, and axis, title and rows of each panel in use."""
    from matplotlib.figure import Figure

    parts: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        case = Case.from_json(row["case"])
        name = f"backward, {case.setting}" if row["direction"] == "backward" else "forward"
        parts.setdefault((case.mask_label(), name), []).append(row)
    masks, passes = (list(dict.fromkeys(key[i] for key in parts)) for i in (0, 1))
    size = (max(4.0 * len(passes), 6.0), 2.8 * len(masks) + 1.2)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    axes = figure.subplots(len(masks), len(passes), squeeze=False)
    panels = []
    for i, mask in enumerate(masks):
        for j, name in enumerate(passes):
            if part := parts.get((mask, name)):
                panels.append((axes[i][j], f"{name}, {mask}", part))
            else:
                axes[i][j].set_axis_off()
    return figure, panels


def _line(axis, rows, name, value, **style) -> None:
    points = sorted((Case.from_json(row["case"]).seqlen_k, value(row)) for row in rows if name in row["results"] and value(row) is not None)
    if points:
        own = name == "streamkl"
        look = {"color": COLOURS.get(name, "black"), "label": NAMES.get(name, name), "lw": 2.2 if own else 1.4, "zorder": 3 if own else 2}
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, **(look | style))


def _level(axis, y, text, ha="right") -> None:
    """A line across at y that says what it is."""
    axis.axhline(y, color=QUIET, lw=1, ls="--")
    axis.annotate(
        text, (0.98 if ha == "right" else 0.02, y), xycoords=("axes fraction", "data"), ha=ha, va="bottom", color="#777777", fontsize=8
    )


def _label(axis, rows, title, quantity, length="N") -> None:
    axis.set_xscale("log", base=2)
    lengths = sorted({Case.from_json(row["case"]).seqlen_k for row in rows})
    axis.set_xticks(lengths, [show_size(n) for n in lengths])
    axis.minorticks_off()
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(quantity, fontsize=9)
    axis.set_xlabel(length, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#eeeeee")
    axis.spines[["top", "right"]].set_visible(False)


def _finish(figure, rows, machine, names):
    """One legend for all panels, and what the figure was measured on."""
    found = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = [NAMES.get(name, name) for name in names] if names else list(found)
    labels = [label for label in order if label in found]
    columns = 4 if len(figure.axes) > 1 else 2
    figure.legend([found[label] for label in labels], labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    case = Case.from_json(rows[0]["case"])
    dims = str(case.head_dim1) if case.head_dim1 == case.head_dim2 else f"{case.head_dim1} and {case.head_dim2}"
    figure.suptitle(f"{machine['name']}: B·H {case.batch * case.heads}, D {dims}, {case.dtype}", fontsize=11)
    return figure


@contextlib.contextmanager
def _defaults():
    """matplotlib as it is delivered, whatever the user's settings, and the same file for the same rows."""
    import matplotlib
    import matplotlib.style

    with matplotlib.style.context("default"), matplotlib.rc_context({"svg.hashsalt": "streamkl_cupy", "svg.fonttype": "path"}):
        yield


def _too_large(row: dict, name: str) -> bool:
    return row["skipped"].get(name) == "out of memory"


def _powers(low: float, high: float):
    """Ticks at powers of 16, or closer ones where these would be few."""
    from matplotlib.ticker import FixedLocator

    step = 4 if high > low * 2**12 else 2 if high > low * 2**6 else 1
    return FixedLocator([2.0**i for i in range(0, 60, step)])


def _short(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def _shade(colour: str, strength: float):
    """A colour mixed with white."""
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - part) for part in to_rgb(colour))
