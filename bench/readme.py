"""README's tables, made from the result files: between `<!-- bench:NAME:begin -->` and `<!-- bench:NAME:end -->`.

NAME is forward, backward, few-rows, memory, host or paper. Of several files on one kind of card the later run wins, cell by cell.
"""

from __future__ import annotations

import re
import sys

from . import paper, report
from .results import FOLDER, committed

README = FOLDER.parent.parent / "README.md"
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+):begin -->\n).*?(<!-- bench:(?P=name):end -->)", re.DOTALL)
PACKAGES = {"cupy-cuda13x": "CuPy", "cupy-cuda12x": "CuPy", "nvrtc": "NVRTC", "torch": "PyTorch", "triton": "Triton", "jax": "JAX"}


def refresh(check: bool = False) -> int:
    """Rewrites the marked tables; with `check` only says whether they are current. 0, or 1 where `check` finds a difference."""
    text = README.read_text()
    fresh = regenerate(text, committed())
    if fresh == text:
        print(f"{README.name} holds what bench/results/ holds", file=sys.stderr)
        return 0
    if check:
        print(f"{README.name} differs from bench/results/; run `python -m bench readme`", file=sys.stderr)
        return 1
    README.write_text(fresh)
    print(f"{README.name} refreshed", file=sys.stderr)
    return 0


def regenerate(text: str, documents: list[dict]) -> str:
    """The text with every marked table made anew. A table without results stays as it is; ValueError for an unknown name."""

    def replace(match):
        table = markdown_table(match["name"], documents)
        return match[0] if table is None else f"{match[1]}{table}\n{match[3]}"

    return MARKED.sub(replace, text)


def markdown_table(name: str, documents: list[dict]) -> str | None:
    """A table and a line on where it comes from, for each machine; None without results."""
    if name not in TABLES:
        raise ValueError(f"README marks a table {name!r}; it takes one of {', '.join(TABLES)}")
    commands, lines_of = TABLES[name]
    blocks = []
    for machine in dict.fromkeys(document["machine"]["name"] for document in documents):
        sources, rows = _latest([d for d in documents if d["machine"]["name"] == machine], commands)
        if not rows:
            continue
        header, lines = lines_of(rows, machine)
        if lines:
            blocks.append(f"{_markdown(header, lines)}\n\n{_origin(sources)}")
    return "\n\n".join(blocks) or None


def _latest(documents: list[dict], commands: tuple[str, ...]) -> tuple[list[dict], list[dict]]:
    """The rows of the given commands, of each cell the last one, and the documents that they come from."""
    cells, origin = {}, {}
    for document in documents:
        for row in document["rows"]:
            if row["command"] in commands:
                key = (row["command"], row["direction"], row.get("framework"), str(sorted(row["case"].items())))
                cells[key], origin[key] = row, document
    sources = [document for document in documents if any(document is o for o in origin.values())]
    order = {command: i for i, command in enumerate(commands)}
    return sources, sorted(cells.values(), key=lambda row: (order[row["command"]], *_place(row)))


def _place(row: dict) -> tuple:
    case = row["case"]
    sizes = (case["batch"] * case["heads"], case["head_dim1"], case["head_dim2"], case["causal"], case["seqlen_q"], case["seqlen_k"])
    return (row["direction"] == "backward", "".join(case["wrt"]) != "q2k2", *sizes)


def _markdown(header: list[str], lines: list[list[str]]) -> str:
    """Columns that say the same in every line move into a sentence above the table."""
    same = {"pass", "N_K", "mask", "B*H", "D"}
    keep, said = [], []
    for i, title in enumerate(header):
        values = {line[i] for line in lines}
        if title == "+-" or values == {report.NONE}:
            continue
        if title == "N_K" and "N_Q" in header and all(line[i] == line[header.index("N_Q")] for line in lines):
            said.append("N_K = N_Q")
        elif title in same and len(values) == 1:
            said.append(next(iter(values)) if title == "pass" else f"{title} {next(iter(values))}")
        else:
            keep.append(i)
    rows = [[line[i] for i in keep] for line in [header, *lines]]
    marks = ["---" if header[i] in ("pass", "mask", "inputs", "") else "---:" for i in keep]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (rows[0], marks, *rows[1:]))
    return f"{', '.join(said)}:\n\n{table}" if said else table


def _origin(documents: list[dict]) -> str:
    machine = documents[-1]["machine"]
    parts = [machine["name"]]
    parts += [f"driver {machine['driver']}"] if machine.get("driver") else []
    parts += [f"{machine['power_limit_w']:.0f} W"] if machine.get("power_limit_w") else []
    parts += [f"{label} {machine['versions'][name]}" for name, label in PACKAGES.items() if name in machine["versions"]]
    dates = sorted({document["run"]["date"][:10] for document in documents})
    parts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    return f"<sub>{', '.join(parts)}; medians, bench/results/.</sub>"


def _paper_lines(rows, machine):
    _, header, lines = paper.comparison(rows, machine)
    return header, lines


TABLES = {
    "forward": (("forward",), lambda rows, _: report.timed_lines(rows)),
    "backward": (("backward",), lambda rows, _: report.timed_lines(rows)),
    "few-rows": (("few-rows",), lambda rows, _: report.timed_lines(rows)),
    "memory": (("memory",), lambda rows, _: report.memory_lines(rows)),
    "host": (("host",), lambda rows, _: report.host_lines(rows)),
    "paper": (("forward", "backward", "few-rows"), _paper_lines),
}
