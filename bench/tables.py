"""README's tables: which rows of all result files go into which, and how they read there.

The main table holds the paper's problems: bfloat16, D 128, as many key heads as heads, N_K = N_Q, one batch element. What else was
timed stands in the table of other shapes; what ran with `--portable`, in a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import paper, report
from .cases import Case, show_size
from .cells import TIMED, is_main, key, open_slices, peers_of, slices

NAMES = {
    "streamkl": "streamkl_cupy",
    "triton": "Triton",
    "compile": "torch.compile",
    "torch": "PyTorch",
    "chunked": "PyTorch in chunks",
    "fla": "FLA",
    "cupy": "CuPy",
    "cudnn": "cuDNN attention",
    "dense": "NumPy",
}
PACKAGES = {
    "cupy-cuda13x": "CuPy", "cupy-cuda12x": "CuPy", "nvrtc": "NVRTC", "torch": "PyTorch", "triton": "Triton",
    "jax": "JAX", "fla-core": "fla-core",
}  # fmt: skip
WORDS = ("pass", "mask", "inputs", "problem")


def main_table(rows: list[dict], *_) -> str:
    return _by_slices(rows, lambda part: _timed(part, peers_of(rows)))


def portable_table(rows: list[dict], everything: list[dict], _) -> str:
    """The kernels for other cards, beside the time that the card's own take."""
    own = {key(row): row["results"].get("streamkl", {}).get("ms") for row in everything}
    plain = [row | {"case": row["case"] | {"portable": False}} for row in rows]
    header, lines = _timed(plain, [], problem=True)
    for row, line in zip(plain, lines, strict=True):
        ms, own_ms = row["results"].get("streamkl", {}).get("ms"), own.get(key(row))
        line += [report.milliseconds(own_ms), f"{ms / own_ms:.2f}x"] if ms and own_ms else [report.NONE] * 2
    return markdown([*header, "Hopper kernels ms", "faster by"], lines)


def shapes_table(rows: list[dict], *_) -> str:
    return markdown(*_timed(rows, peers_of(rows), problem=True))


def few_rows_table(rows: list[dict], *_) -> str:
    names = peers_of(rows)
    header = [
        "pass",
        "N_Q",
        "N_K",
        "mask",
        "B*H",
        "problem",
        "ms",
        "GB/s",
        "copy GB/s",
        "time / copy",
        *(f"vs {NAMES[name]}" for name in names),
    ]
    lines = []
    for row in rows:
        case, ours = Case.from_json(row["case"]), row["results"].get("streamkl", {})
        line = [report.what(row), str(case.seqlen_q), show_size(case.seqlen_k), case.mask_label(), str(slices(row))]
        line += [_problem(case), report.or_none(ours.get("ms"), report.milliseconds), report.or_none(ours.get("gbps"), report.rate)]
        line += [report.or_none(row.get("copy") and row["copy"]["gbps"], report.rate), report.over_copy(row)]
        lines.append(line + [report.versus(row, name) for name in names])
    return markdown(header, lines)


def memory_table(rows: list[dict], *_) -> str:
    names = ["streamkl", *peers_of(rows)]

    def table(part):
        lines = []
        for row in part:
            case = Case.from_json(row["case"])
            line = [report.what(row), show_size(case.seqlen_q), show_size(case.seqlen_k), case.mask_label(), str(slices(row))]
            lines.append([*line, _problem(case), *(report.extra(row, name) for name in names)])
        return ["pass", "N", "N_K", "mask", "B*H", "problem", *(NAMES[name] for name in names)], lines

    return _by_slices(rows, table)


def host_table(rows: list[dict], *_) -> str:
    return markdown(*report.host_lines(rows))


def paper_table(rows: list[dict], _, machine: str) -> str:
    """Published, measured and their ratio, N to the right: of the library, and of the paper's method in Triton as measured here."""
    blocks = []
    for few in (False, True):
        some = [row for row in rows if (row["command"] == "few-rows") == few]
        lengths = sorted({row["case"]["seqlen_k"] for row in some})
        for name, title in (
            ("streamkl", "streamkl_cupy"),
            ("triton", "the paper's kernels in Triton (`bench/triton_kernels.py`), measured here"),
        ):
            lines = {}
            for row in some:
                case, published, ms = Case.from_json(row["case"]), paper.of_row(row, machine), row["results"].get(name, {}).get("ms")
                if ms and published:
                    place = (report.what(row), str(case.seqlen_q) if few else case.mask_label(), str(slices(row)))
                    cells = lines.setdefault(place, dict.fromkeys(lengths, report.NONE))
                    cells[case.seqlen_k] = f"{published:g} / {ms:.3g} = {published / ms:.2f}x"
            header = ["pass", "N_Q" if few else "mask", "B*H", *(f"{'N_K' if few else 'N'} {show_size(n)}" for n in lengths)]
            blocks.append(markdown(header, [[*place, *cells.values()] for place, cells in lines.items()], title))
    return "\n\n".join(filter(None, blocks))


class Table(NamedTuple):
    """Which rows it is made of, and its markdown from these, all rows of that kind of machine, and the machine's name."""

    takes: Callable[[dict], bool]
    write: Callable[[list[dict], list[dict], str], str]


TABLES = {
    "main": Table(lambda row: row["command"] in TIMED and is_main(row), main_table),
    "portable": Table(lambda row: row["command"] in TIMED and row["case"].get("portable", False), portable_table),
    "shapes": Table(lambda row: row["command"] in TIMED and not row["case"].get("portable", False) and not is_main(row), shapes_table),
    "paper": Table(lambda row: paper.of_row(row) is not None, paper_table),
    "few-rows": Table(lambda row: row["command"] == "few-rows", few_rows_table),
    "memory": Table(lambda row: row["command"] == "memory", memory_table),
    "host": Table(lambda row: row["command"] == "host", host_table),
}


def _timed(rows: list[dict], names: list[str], problem: bool = False) -> tuple[list[str], list[list[str]]]:
    header = ["pass", "N", "N_K", "mask", "B*H", "problem", "ms", "TFLOP/s", "sustained", *(f"vs {NAMES[name]}" for name in names)]
    lines = []
    for row in rows:
        case, ours = Case.from_json(row["case"]), row["results"].get("streamkl", {})
        line = [report.what(row), show_size(case.seqlen_q), show_size(case.seqlen_k), case.mask_label(), str(slices(row))]
        line += [_problem(case) if problem else report.NONE, report.or_none(ours.get("ms"), report.milliseconds)]
        line += [report.or_none(ours.get("tflops"), report.rate)]
        line += [report.or_none(row.get("sustained") and row["sustained"]["ratio"], lambda x: f"{x:.3f}")]
        lines.append(line + [report.versus(row, name) for name in names])
    return header, lines


def _problem(case: Case) -> str:
    """What is unlike the main table's problems."""
    parts = [f"D {report.dims(case)}" if report.dims(case) != "128" else "", case.dtype if case.dtype != "bfloat16" else ""]
    parts += [f"{case.heads} heads on {case.kv_heads} key heads" if case.kv_heads != case.heads else ""]
    parts += [f"batch {case.batch}" if case.batch > 1 else ""]
    return ", ".join(filter(None, parts)) or report.NONE


def _by_slices(rows: list[dict], table) -> str:
    """A table for each B * H, all but one folded away."""
    if not rows:
        return ""
    first, blocks = open_slices(rows), []
    for size in sorted({slices(row) for row in rows}, key=lambda size: (size != first, size)):
        title = f"B*H {size}"
        text = markdown(*table([row for row in rows if slices(row) == size]))
        folded = f"<details><summary>{title}</summary>\n\n{text.removeprefix(f'{title}:').lstrip()}\n\n</details>"
        blocks.append(text if size == first else folded)
    return "\n\n".join(blocks)


def markdown(header: list[str], lines: list[list[str]], title: str = "") -> str:
    """Columns that say the same in every line move into a sentence above the table, empty ones vanish."""
    if not lines:
        return ""
    keep, said = [], [title] if title else []
    for i, name in enumerate(header):
        values = {line[i] for line in lines}
        if values == {report.NONE}:
            continue
        if name == "N_K" and "N" in header and all(line[i] == line[header.index("N")] for line in lines):
            continue
        if name in ("pass", "mask", "problem", "B*H") and len(values) == 1:
            said.append(f"B*H {lines[0][i]}" if name == "B*H" else f"{lines[0][i]} mask" if name == "mask" else lines[0][i])
        else:
            keep.append(i)
    marks = ["---" if header[i] in WORDS else "---:" for i in keep]
    rows = [[line[i] for i in keep] for line in [header, *lines]]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (rows[0], marks, *rows[1:]))
    return f"{', '.join(said)}:\n\n{table}" if said else table


def origin(pairs: list[tuple[dict, dict]]) -> str:
    """Card, driver, versions and dates of the documents behind a table, and the largest error in it."""
    documents = list({id(document): document for _, document in pairs}.values())
    machines = [document["machine"] for document in documents]
    parts = [machines[0]["name"]]
    parts += _several("driver {}", [machine.get("driver") for machine in machines])
    parts += _several("{:.0f} W", [machine.get("power_limit_w") for machine in machines])
    for name, label in PACKAGES.items() if machines[0]["device"] == "cuda" else [("numpy", "NumPy")]:
        parts += _several(f"{label} {{}}", [machine["versions"].get(name) for machine in machines])
    dates = sorted({document["run"]["date"][:10] for document in documents})
    parts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    errors = [row["results"].get("streamkl", {}).get("error") for row, _ in pairs]
    errors = [error for error in errors if error is not None]
    worst = f", largest error {max(errors):.1e}" if errors else ""
    return f"<sub>{', '.join(parts)}; medians{worst}.</sub>"


def _several(form: str, values: list) -> list[str]:
    found = list(dict.fromkeys(value for value in values if value is not None))
    return [" and ".join(form.format(value) for value in found)] if found else []
