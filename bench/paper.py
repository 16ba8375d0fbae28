"""The StreamKL paper's tables (arXiv 2606.20005v1, figures 7, 9, 11, 12 and 13) as data, and our times against them.

All at D = 128, bfloat16, N_Q = N_K, batch = B * H slices. Milliseconds as printed; beyond the memory of the card the paper
extrapolates its baselines, StreamKL itself is measured throughout.
"""

from __future__ import annotations

from typing import NamedTuple

from .cases import Case, parse_size, show_size

CARDS = ("H200", "A100")
SLICES = (16, 32)


class Key(NamedTuple):
    """A published cell: direction, setting (None forward), causal, card, B * H, N."""

    direction: str
    setting: int | None
    causal: bool
    card: str
    slices: int
    n: int


# N: H200 b16 | H200 b32 | A100 b16 | A100 b32. Names of the numbers in a cell: see BASELINES.
TEXT = {
    ("forward", None, False): """
4k 6.9/1.3/1.6/0.5 | 13/3.5/3.1/1.0 | 16/3.0/4.5/1.2 | 30/7.4/7.3/2.4
8k 29/6.3/4.4/1.8 | 58/12/8.8/3.4 | 61/12/12/4.5 | 123/26/20/8.7
16k 106/23/18/6.9 | 234/47/36/13 | 247/49/41/16 | 495/100/83/33
32k 468/93/69/26 | 936/187/140/56 | 990/198/166/66 | 2.0s/399/332/135
64k 1.9s/374/281/112 | 3.7s/749/563/231 | 4.0s/798/665/268 | 7.9s/1.6s/1.3s/544
128k 7.5s/1.5s/1.1s/433 | 14s/3.0s/2.3s/989 | 15s/3.2s/2.7s/1.1s | 31s/6.4s/5.3s/2.2s
256k 29s/6.0s/4.5s/1.7s | 59s/11s/9.0s/4.0s | 63s/12s/10s/4.4s | 126s/25s/21s/8.8s
512k 119s/23s/18s/7.5s | 239s/47s/36s/14s | 253s/51s/42s/17s | 507s/102s/85s/35s""",
    ("forward", None, True): """
4k 9.9/1.9/2.1/0.4 | 19/4.0/4.2/0.6 | 22/3.2/4.9/0.8 | 42/8.2/9.8/1.5
8k 40/6.7/6.7/1.1 | 80/13/12/2.0 | 84/13/15/2.5 | 168/27/30/4.7
16k 150/26/26/3.8 | 320/52/52/7.7 | 337/53/61/9.4 | 675/106/123/18
32k 640/101/101/15 | 1.3s/209/211/30 | 1.4s/208/246/36 | 2.7s/424/492/71
64k 2.6s/419/423/60 | 5.1s/838/847/122 | 5.4s/848/985/144 | 10s/1.7s/2.0s/284
128k 10s/1.7s/1.7s/257 | 20s/3.4s/3.4s/522 | 21s/3.4s/3.9s/572 | 43s/6.8s/7.9s/1.1s
256k 41s/6.7s/6.8s/1.1s | 82s/13s/13s/2.1s | 86s/13s/15s/2.3s | 172s/27s/31s/4.5s
512k 164s/26s/27s/3.9s | 328s/53s/54s/7.8s | 345s/54s/63s/9.1s | 691s/108s/126s/18s""",
    ("backward", 1, False): """
4k 4.0/1.2/0.6/1.1 | 7.7/2.4/1.6/2.1 | 8.5/3.0/1.4/2.9 | 16/5.2/3.4/5.8
8k 15/4.1/2.8/4.1 | 30/8.7/6.1/8.3 | 31/8.6/5.9/11 | 63/18/13/21
16k 62/16/10/15 | 120/32/37/32 | 127/35/21/42 | 255/70/75/85
32k 241/65/84/62 | 482/129/151/129 | 511/174/108/169 | 1.0s/281/216/346
64k 964/258/303/249 | 1.9s/516/606/511 | 2.0s/562/432/681 | 4.1s/1.1s/865/1.5s
128k 3.9s/1.0s/1.2s/969 | 7.7s/2.1s/2.4s/2.2s | 8.2s/2.3s/1.7s/2.9s | 16s/4.5s/3.5s/6.2s
256k 15s/4.1s/4.9s/4.2s | 30s/8.3s/9.7s/8.9s | 32s/9.0s/6.9s/11s | 65s/18s/13s/24s
512k 61s/16s/19s/17s | 123s/33s/38s/35s | 130s/36s/27s/48s | 261s/72s/55s/99s""",
    ("backward", 1, True): """
4k 5.1/1.4/0.8/0.6 | 9.9/2.7/1.6/1.2 | 10/3.3/1.4/2.0 | 21/6.7/3.6/3.6
8k 19/4.9/3.1/2.2 | 38/9.6/6.0/4.4 | 41/9.5/5.9/6.0 | 82/23/13/12
16k 80/17/11/8.2 | 156/35/36/17 | 166/42/21/23 | 332/85/74/48
32k 312/70/83/32 | 624/142/147/67 | 665/171/109/95 | 1.3s/343/218/192
64k 1.2s/285/295/129 | 2.5s/571/591/260 | 2.7s/687/437/380 | 5.3s/1.4s/874/763
128k 5.0s/1.1s/1.2s/523 | 10.0s/2.3s/2.4s/1.1s | 10s/2.8s/1.7s/1.5s | 21s/5.5s/3.5s/3.2s
256k 19s/4.6s/4.7s/2.1s | 39s/9.1s/9.5s/4.5s | 42s/11s/7.0s/6.0s | 85s/22s/13s/12s
512k 79s/18s/18s/8.5s | 159s/36s/37s/18s | 170s/44s/27s/24s | 340s/88s/55s/51s""",
    ("backward", 2, False): """
4k 5.8/1.4/1.0 | 11/2.6/1.9 | 12/3.1/2.9 | 23/5.3/5.7
8k 22/5.6/3.6 | 43/10/7.4 | 46/12/11 | 93/21/21
16k 90/22/13 | 176/44/29 | 187/53/42 | 375/100/88
32k 352/108/57 | 704/177/119 | 750/201/174 | 1.5s/402/375
64k 1.4s/355/229 | 2.8s/710/521 | 3.0s/804/742 | 6.0s/1.6s/1.6s
128k 5.6s/1.4s/890 | 11s/2.8s/2.2s | 12s/3.2s/3.1s | 24s/6.4s/6.3s
256k 22s/5.7s/4.2s | 45s/11s/8.9s | 48s/12s/12s | 96s/25s/25s
512k 90s/22s/16s | 180s/45s/33s | 192s/51s/49s | 384s/102s/100s""",
    ("backward", 2, True): """
4k 7.0/1.5/0.6 | 13/2.8/1.1 | 14/3.7/1.6 | 28/6.0/3.1
8k 26/6.1/2.0 | 52/10/4.1 | 56/13/5.8 | 112/22/11
16k 108/23/7.8 | 212/47/16 | 226/56/23 | 452/111/47
32k 425/112/30 | 850/190/63 | 904/222/93 | 1.8s/445/187
64k 1.7s/380/138 | 3.4s/761/278 | 3.6s/890/372 | 7.2s/1.8s/794
128k 6.8s/1.5s/539 | 13s/3.0s/1.1s | 14s/3.6s/1.6s | 28s/7.1s/3.2s
256k 27s/6.1s/2.1s | 54s/12s/4.5s | 57s/14s/6.3s | 115s/28s/12s
512k 108s/24s/8.5s | 217s/48s/17s | 231s/56s/25s | 463s/113s/50s""",
}
BASELINES = {None: ("torch", "compile", "fla", "streamkl"), 1: ("torch", "compile", "fla", "streamkl"), 2: ("torch", "compile", "streamkl")}

# Figures 12 and 13, B * H = 16, full mask, H200: N_Q by N_K of 64k, 128k, 256k, 512k. Split-K forward; fused backward, setting 1.
FEW_ROWS_KEYS = (64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024)
FEW_ROWS = {
    "forward": {1: (0.27, 0.51, 0.78, 1.31), 16: (0.27, 0.51, 0.78, 1.32), 32: (0.51, 0.74, 1.27, 2.35), 64: (0.74, 1.26, 2.34, 4.49)},
    "backward": {1: (0.78, 1.46, 2.79, 5.46), 16: (1.00, 1.89, 3.68, 7.24), 32: (1.30, 2.50, 4.89, 9.65), 64: (1.86, 3.61, 7.08, 14.0)},
}
"""Milliseconds of the faster of the paper's two forms (separate in the backward at 64 rows)."""


def _milliseconds(text: str) -> float:
    return float(text[:-1]) * 1e3 if text.endswith("s") else float(text)


def _cells() -> dict[Key, dict[str, float]]:
    cells = {}
    for (direction, setting, causal), text in TEXT.items():
        for line in text.strip().splitlines():
            n, rest = line.split(" ", 1)
            columns = [(card, slices) for card in CARDS for slices in SLICES]
            for (card, slices), cell in zip(columns, rest.split(" | "), strict=True):
                values = map(_milliseconds, cell.split("/"))
                key = Key(direction, setting, causal, card, slices, parse_size(n))
                cells[key] = dict(zip(BASELINES[setting], values, strict=True))
    return cells


CELLS = _cells()
"""Milliseconds of every contender by published cell."""


def published(case: Case, direction: str, card: str) -> float | None:
    """The paper's StreamKL time for a case, or None where it has none."""
    settings = {("q2", "k2"): 1, ("q1", "k1"): 2}
    setting = None if direction == "forward" else settings.get(case.wrt, 0)
    plain = case.head_dim1 == case.head_dim2 == 128 and case.dtype == "bfloat16" and case.kv_heads == case.heads and case.window == (-1, -1)
    plain = plain and not case.portable and not (direction == "backward" and case.deterministic)
    if not plain:
        return None
    slices = case.batch * case.heads
    if case.seqlen_q != case.seqlen_k:
        few = (
            FEW_ROWS[direction].get(case.seqlen_q) if setting in (None, 1) and not case.causal and slices == 16 and card == "H200" else None
        )
        return few[FEW_ROWS_KEYS.index(case.seqlen_k)] if few and case.seqlen_k in FEW_ROWS_KEYS else None
    cell = CELLS.get(Key(direction, setting, case.causal, card, slices, case.seqlen_q))
    return cell and cell["streamkl"]


def of_row(row: dict, card_name: str = "H200") -> float | None:
    """The paper's StreamKL time for a row of results, on its card that is most like the named one."""
    if row["command"] not in ("forward", "backward", "few-rows"):
        return None
    return published(Case.from_json(row["case"]), row["direction"], _card(card_name))


def _card(name: str) -> str:
    return "A100" if "A100" in name else "H200"


def comparison(rows: list[dict], card_name: str) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and lines: our time and the Triton peer's against the published one, for every published cell measured."""
    lines = []
    for row in rows:
        case = Case.from_json(row["case"])
        times = {name: result.get("ms") for name, result in row["results"].items()}
        ours, theirs = times.get("streamkl"), of_row(row, card_name)
        if ours is None or theirs is None:
            continue
        lengths = show_size(case.seqlen_q) if case.seqlen_q == case.seqlen_k else f"{case.seqlen_q} x {show_size(case.seqlen_k)}"
        what = row["direction"] if row["direction"] == "forward" else f"backward {case.setting}"
        triton = times.get("triton")
        line = [what, lengths, case.mask_label(), str(case.batch * case.heads), f"{theirs:g}", f"{ours:.3g}", f"{theirs / ours:.2f}x"]
        lines.append([*line, f"{triton:.3g}" if triton else "-", f"{theirs / triton:.2f}x" if triton else "-"])
    header = ["", "N", "mask", "B*H", "paper ms", "ours ms", "ratio", "Triton here ms", "ratio"]
    return f"Against the paper's times on its {_card(card_name)} (here: {card_name})", header, lines
