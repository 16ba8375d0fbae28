"""README's tables and figures, made from the result files: between `<!-- bench:NAME:begin -->` and `<!-- bench:NAME:end -->`.

NAME is `figures` or one of those in bench/tables.py. Figures are SVG files beside the results. Of several files on one kind of card
the later run wins, cell by cell.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from . import plots, results
from .cells import is_main, latest, open_slices, slices
from .results import FOLDER, committed
from .tables import TABLES, origin

README = FOLDER.parent.parent / "README.md"
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+):begin -->\n).*?(<!-- bench:(?P=name):end -->)", re.DOTALL)
CAPTIONS = {
    "tflops": "TFLOP/s against N",
    "speedup": "Speed-up over each peer against N",
    "memory": "Peak extra memory against N, crosses where a peer ran out of memory",
    "few-rows": "Bandwidth against N_K where few rows meet many keys",
}


class Figure(NamedTuple):
    kind: str
    machine: dict
    rows: list[dict]

    @property
    def path(self) -> Path:
        words = re.sub(r"[^a-z0-9]+", "-", self.machine["name"].lower()).strip("-")
        return results.FOLDER / f"{words}-{self.kind}.svg"

    @property
    def current(self) -> bool:
        """Whether the file there was drawn from these rows."""
        return self.path.exists() and plots.digest(self.kind, self.rows, self.machine) in self.path.read_text()


def refresh(check: bool = False) -> int:
    """Makes tables and figures anew; with `check` only says whether they are current. 0, or 1 where `check` finds a difference."""
    text, documents = README.read_text(), committed()
    fresh, wanted = regenerate(text, documents), figures(documents)
    stale = [figure for figure in wanted if not figure.current]
    left_over = [path for path in results.FOLDER.glob("*.svg") if path not in {figure.path for figure in wanted}]
    changed = [README.name] * (fresh != text) + [path.name for path in (*(figure.path for figure in stale), *left_over)]
    if not changed:
        print(f"{README.name} holds what bench/results/ holds", file=sys.stderr)
        return 0
    if check:
        print(f"{', '.join(changed)}: not what bench/results/ holds; run `python -m bench readme`", file=sys.stderr)
        return 1
    for figure in stale:
        _draw(figure)
    for path in left_over:
        path.unlink()
    README.write_text(fresh)
    print(f"refreshed {', '.join(changed)}", file=sys.stderr)
    return 0


def regenerate(text: str, documents: list[dict]) -> str:
    """The text with every marked part made anew. A part without results is left empty; ValueError for an unknown name."""

    def replace(match):
        part = figure_lines(documents) if match["name"] == "figures" else tables(match["name"], documents)
        return f"{match[1]}{part}\n{match[3]}" if part else match[1] + match[3]

    return MARKED.sub(replace, text)


def tables(name: str, documents: list[dict]) -> str:
    """A table and a line on where it comes from, for each machine."""
    if name not in TABLES:
        raise ValueError(f"README marks a table {name!r}; it takes one of figures, {', '.join(TABLES)}")
    table, blocks = TABLES[name], []
    for machine, pairs in _by_machine(documents).items():
        used = [pair for pair in pairs if table.takes(pair[0])]
        if text := table.write([row for row, _ in used], [row for row, _ in pairs], machine):
            blocks.append(f"{text}\n\n{origin(used)}")
    return "\n\n".join(blocks)


def figures(documents: list[dict]) -> list[Figure]:
    """What can be drawn: main table's problems of one B * H, where there are two lengths or more."""
    found = []
    for pairs in _by_machine(documents).values():
        for kind in plots.FIGURES:
            some = [(row, document) for row, document in pairs if row["command"] in plots.FIGURES[kind][0]]
            if kind != "few-rows":
                some = [(row, document) for row, document in some if is_main(row)]
            if not some:
                continue
            shown = open_slices([row for row, _ in some])
            rows = plots.alike([row for row, _ in some if slices(row) == shown and not row["case"].get("portable")])
            if len({row["case"]["seqlen_k"] for row in rows}) > 1:
                found.append(Figure(kind, some[-1][1]["machine"], rows))
    return found


def figure_lines(documents: list[dict]) -> str:
    return "\n\n".join(
        f"![{CAPTIONS[figure.kind]}, {figure.machine['name']}](bench/results/{figure.path.name})" for figure in figures(documents)
    )


def _by_machine(documents: list[dict]) -> dict[str, list[tuple[dict, dict]]]:
    """(row, document) of every cell by the machine's name."""
    names = dict.fromkeys(document["machine"]["name"] for document in documents)
    return {name: latest([d for d in documents if d["machine"]["name"] == name]) for name in names}


def _draw(figure: Figure) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("figures need matplotlib: pip install 'streamkl-cupy[bench]'") from None
    plots.save(figure.kind, figure.rows, figure.machine, figure.path)
