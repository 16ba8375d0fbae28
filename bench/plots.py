"""Figures from result rows: speed-up and TFLOP/s against N, memory against N, bandwidth of few rows. One figure a kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .cases import Case, show_size
from .report import peers_of

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


def write(rows: list[dict], machine: dict, path: Path) -> list[Path]:
    """Draws every kind of figure that the rows give, and returns the files: `path` for one kind, else a suffix for each."""
    drawn = {kind: draw for kind, draw in FIGURES.items() if _chosen(rows, kind)}
    files = []
    for kind, draw in drawn.items():
        target = path if len(drawn) == 1 else path.with_name(f"{path.stem}-{kind}{path.suffix}")
        figure = draw(_chosen(rows, kind), machine)
        figure.savefig(target, dpi=160)
        files.append(target)
    return files


def _chosen(rows: list[dict], kind: str) -> list[dict]:
    """Rows of a kind that share B * H, head dimensions, dtype and key heads: the combination with the most."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["command"] == kind:
            case = Case.from_json(row["case"])
            shared = (case.batch * case.heads, case.kv_heads, case.head_dim1, case.head_dim2, case.dtype)
            groups.setdefault(shared, []).append(row)
    return max(groups.values(), key=len) if groups else []


def _speed(rows: list[dict], machine: dict):
    """A row of panels for each mask and setting: TFLOP/s, and speed-up of the library over each peer."""
    panels = _split(rows)
    figure, axes = _figure(len(panels), 2)
    names = peers_of(rows)
    for (title, part), (rate, gain) in zip(panels.items(), axes, strict=True):
        for name in ("streamkl", *names):
            _line(rate, part, name, lambda row, name=name: row["results"][name].get("tflops"))
        for name in names:
            _line(gain, part, name, lambda row, name=name: row["results"][name].get("speedup"))
        if peak := [row["cublas"]["tflops"] for row in part if "cublas" in row]:
            rate.axhline(sum(peak) / len(peak), color="#bbbbbb", lw=1, ls="--")
            rate.annotate(
                "cuBLAS 8192³",
                (1, sum(peak) / len(peak)),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                color="#888888",
                fontsize=8,
            )
        gain.set_yscale("log", base=2)
        gain.axhline(1, color="#bbbbbb", lw=1, ls="--")
        gain.yaxis.set_major_formatter(lambda y, _: f"{y:g}x")
        _label(rate, part, title, "TFLOP/s, useful arithmetic")
        _label(gain, part, title, "times faster than the peer")
        rate.set_ylim(bottom=0)
    return _finish(figure, axes, rows, machine, ("streamkl", *names))


def _memory(rows: list[dict], machine: dict):
    """A panel for each direction and setting of one mask; crosses on the card's capacity where a contender ran out of memory."""
    masks = [Case.from_json(row["case"]).mask_label() for row in rows]
    rows = [row for row, mask in zip(rows, masks, strict=True) if mask == masks[0]]
    panels = _split(rows)
    figure, axes = _figure(1, len(panels))
    names = ["streamkl", *peers_of(rows)]
    names += [n for n in COLOURS if n not in names and any(row["skipped"].get(n) == "out of memory" for row in rows)]
    capacity = machine.get("memory_bytes")
    for (title, part), axis in zip(panels.items(), axes[0], strict=True):
        failures = [n for n in names if any(row["skipped"].get(n) == "out of memory" for row in part)]
        for name in names:
            _line(axis, part, name, lambda row, name=name: row["results"][name].get("extra_bytes"))
        if capacity:
            axis.axhline(capacity, color="#bbbbbb", lw=1, ls="--")
            for place, name in enumerate(failures):
                at = [Case.from_json(row["case"]).seqlen_k for row in part if row["skipped"].get(name) == "out of memory"]
                axis.plot(at, [capacity * 2.0 ** (place + 1)] * len(at), "x", color=COLOURS.get(name, "black"), ms=7, mew=2)
            note = f"card: {capacity / 2**30:.0f} GiB" + ("; above: out of memory" if failures else "")
            axis.annotate(note, (0.02, capacity), xycoords=("axes fraction", "data"), va="top", color="#888888", fontsize=8)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda y, _: _short(y))
        axis.yaxis.set_major_locator(_every(16, 2**20))
        _label(axis, part, title, "peak extra memory")
    return _finish(figure, axes, rows, machine, names)


def _few_rows(rows: list[dict], machine: dict):
    """A panel for each direction: GB/s against N_K, one shade a row count, the Triton peer dashed."""
    panels = _split(rows)
    figure, axes = _figure(1, len(panels))
    counts = sorted({Case.from_json(row["case"]).seqlen_q for row in rows})
    for (title, part), axis in zip(panels.items(), axes[0], strict=True):
        for place, count in enumerate(counts):
            some = [row for row in part if Case.from_json(row["case"]).seqlen_q == count]
            for name, style in (("streamkl", "-"), ("triton", "--")):
                shade = _shade(COLOURS[name], 1 - 0.75 * place / max(len(counts), 1))
                label = f"{'streamkl_cupy' if name == 'streamkl' else 'Triton'}, N_Q {count}"
                _line(axis, some, name, lambda row, name=name: row["results"][name].get("gbps"), color=shade, ls=style, label=label)
        axis.set_ylim(bottom=0)
        _label(axis, part, title, "GB/s")
        axis.set_xlabel("N_K")
    return _finish(figure, axes, rows, machine, None)


FIGURES: dict[str, Callable] = {"forward": _speed, "backward": _speed, "memory": _memory, "few-rows": _few_rows}


def _split(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by panel: direction, setting and mask."""
    parts: dict[str, list[dict]] = {}
    for row in rows:
        case = Case.from_json(row["case"])
        setting = f", {case.setting}" if row["direction"] == "backward" else ""
        parts.setdefault(f"{row['direction']}{setting}, {case.mask_label()}", []).append(row)
    return parts


def _figure(rows: int, columns: int):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows + 1.0), squeeze=False, layout="constrained")


def _line(axis, rows, name, value, **style) -> None:
    points = sorted((Case.from_json(row["case"]).seqlen_k, value(row)) for row in rows if name in row["results"] and value(row) is not None)
    if points:
        own = name == "streamkl"
        look = {"color": COLOURS.get(name, "black"), "label": NAMES.get(name, name), "lw": 2.2 if own else 1.4, "zorder": 3 if own else 2}
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, **(look | style))


def _label(axis, rows, title, quantity) -> None:
    axis.set_xscale("log", base=2)
    lengths = sorted({Case.from_json(row["case"]).seqlen_k for row in rows})
    axis.set_xticks(lengths, [show_size(n) for n in lengths])
    axis.minorticks_off()
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(quantity, fontsize=9)
    axis.set_xlabel("N", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#eeeeee")
    axis.spines[["top", "right"]].set_visible(False)


def _finish(figure, axes, rows, machine, names):
    """One legend for all panels, and what the figure was measured on."""
    found = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = [NAMES.get(name, name) for name in names] if names else list(found)
    labels = [label for label in order if label in found]
    figure.legend(
        [found[label] for label in labels], labels, loc="outside lower center", ncols=min(4, 2 * axes.shape[1]), fontsize=8, frameon=False
    )
    case = Case.from_json(rows[0]["case"])
    dims = str(case.head_dim1) if case.head_dim1 == case.head_dim2 else f"{case.head_dim1} and {case.head_dim2}"
    figure.suptitle(f"{machine['name']}: B·H {case.batch * case.heads}, D {dims}, {case.dtype}", fontsize=11)
    return figure


def _every(base: float, unit: float):
    """Ticks at unit * base^i."""
    from matplotlib.ticker import FixedLocator

    return FixedLocator([unit * base**i for i in range(-4, 8)])


def _short(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def _shade(colour: str, strength: float):
    """A colour mixed with white."""
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - part) for part in to_rgb(colour))
