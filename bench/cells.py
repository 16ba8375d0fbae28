"""Cells of results: one problem, measured one way. Which run's row stands for it, and which cells are the paper's problems."""

from __future__ import annotations

from .cases import SETTINGS, Case
from .peers import MODULES

TIMED = ("forward", "backward")
MAIN_SLICES = 16
"""B * H of the table that stands open and of the plots."""


def latest(documents: list[dict]) -> list[tuple[dict, dict]]:
    """(row, its document) of every cell, from the last document that has it, in the order of a table.

    A timed row of the paper's problems also says what memory was taken; it stands in where the `memory` command was not run.
    """
    cells = {}
    for document in documents:
        for row in document["rows"]:
            cells[key(row)] = (row, document)
    for row, document in list(cells.values()):
        if row["command"] in TIMED and is_main(row) and (memory := _memory_of(row))["results"]:
            cells.setdefault(key(memory), (memory, document))
    return sorted(cells.values(), key=lambda pair: _place(pair[0]))


def key(row: dict) -> tuple:
    """What two rows share that measure the same."""
    case = Case.from_json(row["case"])
    fields = case.to_json()
    if row["direction"] == "forward":
        del fields["wrt"], fields["deterministic"]  # it takes no notice of them
    return (row["command"], row["direction"], row.get("framework"), *fields.values())


def _memory_of(row: dict) -> dict:
    taken = {name: {"extra_bytes": result["extra_bytes"]} for name, result in row["results"].items() if "extra_bytes" in result}
    return row | {"command": "memory", "results": taken}


def _place(row: dict) -> tuple:
    case = Case.from_json(row["case"])
    settings = list(SETTINGS)
    setting = settings.index(case.wrt) if case.wrt in settings else len(settings)
    sizes = (case.batch * case.heads, case.head_dim1, case.head_dim2, case.causal, case.window, case.seqlen_q, case.seqlen_k)
    return (row["direction"] == "backward", setting, *sizes, case.kv_heads, case.dtype, case.deterministic, case.portable)


def is_main(row: dict) -> bool:
    """Whether a row's problem is one of the paper's, for which the main table has a place."""
    case, backward = Case.from_json(row["case"]), row["direction"] == "backward"
    plain = case.dtype == "bfloat16" and case.head_dim1 == case.head_dim2 == 128 and case.batch == 1 and case.kv_heads == case.heads
    plain = plain and case.seqlen_q == case.seqlen_k and case.window == (-1, -1) and not case.portable
    return plain and not (backward and (case.deterministic or case.setting not in ("setting 1", "setting 2")))


def peers_of(rows: list[dict]) -> list[str]:
    """Peers that any row measured or found too large for the memory, in one order everywhere."""
    seen = {name for row in rows for name in row["results"]}
    seen |= {name for row in rows for name, why in row["skipped"].items() if why == "out of memory"}
    return [name for name in MODULES if name in seen]


def open_slices(rows: list[dict]) -> int:
    """B * H of the part that stands open and that plots show."""
    found = {slices(row) for row in rows}
    return MAIN_SLICES if MAIN_SLICES in found else min(found)


def slices(row: dict) -> int:
    """B * H."""
    return row["case"]["batch"] * row["case"]["heads"]
