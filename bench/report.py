"""Plain-text tables of result rows, and how numbers are written everywhere."""

from __future__ import annotations

from .cases import Case, show_size

NONE = "-"


def align(header: list[str], lines: list[list[str]]) -> str:
    """Columns padded to their widest cell; the first three to the left, numbers to the right."""
    table = [header, *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    left = [all(not any(c.isdigit() for c in line[i]) for line in lines) for i in range(len(header))]

    def show(line):
        cells = (cell.ljust(w) if flush else cell.rjust(w) for cell, w, flush in zip(line, widths, left, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([show(header), "  ".join("-" * w for w in widths), *map(show, lines)])


def milliseconds(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def size(count: float) -> str:
    """Bytes in binary units: 33 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def peers_of(rows: list[dict]) -> list[str]:
    """Names of the peers that any row measured, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row["results"] if name != "streamkl"))


def table(rows: list[dict]) -> str:
    """The table of timed or memory rows: what the command prints."""
    blocks = []
    timed = [row for row in rows if row["command"] in ("forward", "backward", "few-rows")]
    if timed:
        blocks.append(align(*timed_lines(timed)))
    if memory := [row for row in rows if row["command"] == "memory"]:
        blocks.append(align(*memory_lines(memory)))
    if host := [row for row in rows if row["command"] == "host"]:
        blocks.append(align(*host_lines(host)))
    return "\n\n".join(blocks)


def timed_lines(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    names = peers_of(rows)
    few = any(row["command"] == "few-rows" for row in rows)
    header = ["pass", "N_Q", "N_K", "mask", "B*H", "D", "ms", "+-", "TFLOP/s", "of cuBLAS", "sustained"]
    header += (["GB/s", "time / copy"] if few else []) + ["extra", "error", *(f"vs {name}" for name in names)]
    lines = []
    for row in rows:
        case, ours = Case.from_json(row["case"]), row["results"].get("streamkl", {})
        sustained = row.get("sustained")
        line = [what(row), show_size(case.seqlen_q), show_size(case.seqlen_k), case.mask_label(), str(case.batch * case.heads), dims(case)]
        line += [
            or_none(ours.get("ms"), milliseconds),
            or_none(ours.get("spread"), lambda x: f"{100 * x:.1f}%"),
            or_none(ours.get("tflops"), rate),
            or_none(ours.get("of_cublas"), lambda x: f"{x:.3f}"),
            or_none(sustained and sustained["ratio"], lambda x: f"{x:.3f}"),
        ]
        line += [or_none(ours.get("gbps"), rate), over_copy(row)] if few else []
        line += [or_none(ours.get("extra_bytes"), size), or_none(ours.get("error"), lambda x: f"{x:.1e}")]
        lines.append(line + [versus(row, name) for name in names])
    return header, lines


def memory_lines(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    names = ["streamkl", *peers_of(rows)]
    names += [n for n in dict.fromkeys(n for row in rows for n, why in row["skipped"].items() if why == "out of memory") if n not in names]
    lines = []
    for row in rows:
        case = Case.from_json(row["case"])
        line = [what(row), show_size(case.seqlen_q), show_size(case.seqlen_k), case.mask_label(), str(case.batch * case.heads), dims(case)]
        lines.append(line + [extra(row, name) for name in names])
    return ["pass", "N_Q", "N_K", "mask", "B*H", "D", *names], lines


def host_lines(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    fields = ("forward_first_us", "backward_first_us", "forward_us", "backward_us", "forward_refill_us", "backward_refill_us")
    header = ["inputs", "N", "B*H", "forward: first us", "backward: first us", "forward us", "backward us", "with out=: forward us"]
    header += ["with out=: backward us", "graph: kernels us", "replay adds us"]
    lines = []
    for row in rows:
        case = Case.from_json(row["case"])
        times, graph = row["results"].get(row["framework"], {}), row.get("graph", {})
        line = [row["framework"], show_size(case.seqlen_q), str(case.batch * case.heads)]
        line += [or_none(times.get(field), rate) for field in fields]
        lines.append(line + [or_none(graph.get(field), rate) for field in ("kernels_us", "replay_adds_us")])
    return header, lines


def over_copy(row: dict) -> str:
    """Our time over that of moving the same bytes once at the rate of a copy in the same run."""
    ours = row["results"].get("streamkl", {}).get("gbps")
    return f"{row['copy']['gbps'] / ours:.2f}" if ours and "copy" in row else NONE


def versus(row: dict, name: str) -> str:
    """The speed-up over a peer; a companion's TFLOP/s; or why there is neither, in a word."""
    result = row["results"].get(name)
    if result is None:
        return "oom" if row["skipped"].get(name) == "out of memory" else NONE
    return f"{result['speedup']:.{1 if result['speedup'] >= 10 else 2}f}x" if "speedup" in result else f"({rate(result['tflops'])} TF)"


def extra(row: dict, name: str) -> str:
    result = row["results"].get(name)
    if result is None or "extra_bytes" not in result:
        return "oom" if row["skipped"].get(name) == "out of memory" else NONE
    return size(result["extra_bytes"])


def skipped(rows: list[dict]) -> list[str]:
    """One line for each contender and reason, with the cases that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        label = f"{what(row)} {Case.from_json(row['case']).label()}"
        for name, reason in row["skipped"].items():
            found.setdefault((name, reason), []).append(label)
    return [
        f"{name}: {reason} ({'all cases' if len(cases) == len(rows) else ', '.join(dict.fromkeys(cases))})"
        for (name, reason), cases in found.items()
    ]


def what(row: dict) -> str:
    if row["direction"] != "backward":
        return row["direction"]
    return f"backward {Case.from_json(row['case']).setting}"


def dims(case: Case) -> str:
    return str(case.head_dim1) if case.head_dim1 == case.head_dim2 else f"{case.head_dim1}/{case.head_dim2}"


def or_none(value, show) -> str:
    """A value as `show` writes it, or the sign for none."""
    return NONE if value is None else show(value)
