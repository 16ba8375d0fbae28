"""The tables of tile shapes: which kernel a problem takes, in which shape, and why; checked against the device's shared memory.

A row is one specialisation of one kernel. Rows stand in order of preference; `choose` takes the first whose shared memory fits
and that fills a multiprocessor with as many warps as the best row that fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..problem import Problem
from . import tiles_sm90
from .device import DeviceInfo
from .specialisation import ELEMENTS, HEAD_DIM_CLASSES, STATS_BYTES, TERMS_BYTES, Specialisation, Tile, choose, head_dim_class

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SPILL_BUDGET = 512
"""Bytes of spill stores plus loads a thread that a row may have: outside the main loops they cost nothing that a timing shows."""

FORWARD = (
    Tile(
        4,
        2,
        48,
        2,
        2,
        "32 rows a warp halve the key traffic out of shared memory; two blocks hide each other's exponentials; 48 keys do not spill",
    ),
    Tile(4, 1, 64, 2, 2, "where 128 rows of both sides do not fit twice"),
    Tile(4, 1, 32, 2, 2, "the same at 256 columns and in 99 KB"),
    Tile(2, 1, 32, 2, 2, "the last resort: 32 rows"),
)
BACKWARD_NARROW = (
    Tile(4, 2, 64, 2, 2, "up to 64 columns of result leave registers for 64 columns of logits"),
    Tile(4, 1, 32, 2, 2, "where that does not fit"),
)
BACKWARD = (
    Tile(4, 2, 32, 2, 2, "32 rows a warp: 128 registers of result, and half the traffic out of shared memory"),
    Tile(4, 1, 32, 2, 2, "where 128 rows do not fit twice"),
    Tile(2, 1, 32, 2, 2, "the last resort: 32 rows"),
)
BACKWARD_WIDE = (
    Tile(4, 1, 32, 2, 2, "192 or 256 columns of result take 128 registers at 16 rows a warp"),
    Tile(2, 1, 32, 2, 2, "where 64 rows of both sides do not fit"),
)
BACKWARD_BOTH = (
    Tile(4, 1, 32, 3, 2, "two results; a third slice keeps both sides' keys until their gradients are taken"),
    Tile(2, 1, 32, 3, 2, "where 64 rows of both sides do not fit"),
)

CHUNKED_FORWARD = (Tile(4, 2, 48, 2, 2, "logits take the registers; nothing else stays"),)
CHUNKED_BACKWARD = (Tile(4, 1, 32, 2, 2, "128 columns of result in 64 registers leave room for FFMA's operands", result=128),)
CHUNK_BYTES = 128
"""A row of a chunk: 32 columns of float32, 64 of the 16-bit types."""


def chunked(problem: Problem) -> bool:
    """Whether the problem takes the chunked kernels."""
    return problem.dtype == "float32" or max(problem.head_dim1, problem.head_dim2) > HEAD_DIM_CLASSES[-1]


def forward(problem: Problem, device: DeviceInfo, tensor_maps: bool) -> Specialisation:
    """The forward kernel of a problem; `tensor_maps`: whether the bulk copy engine can address its keys. RuntimeError where no
    row fits the device."""
    if tensor_maps and tiles_sm90.takes(problem, device):
        return choose(tiles_sm90.forward_rows(problem), device)
    return choose(_forward_rows(problem), device)


def backward(problem: Problem, own: str, sides: tuple[int, ...], device: DeviceInfo, tensor_maps: bool) -> Specialisation:
    """The kernel for dQ (`own` is "q") or dK ("k") of the given sides, in one launch: see `launches`."""
    if tensor_maps and tiles_sm90.takes(problem, device):
        return choose(tiles_sm90.backward_rows(problem, own, *sides), device)
    return choose(_backward_rows(problem, own, sides), device)


def launches(problem: Problem, wrt: tuple[str, ...], one_side: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """Which launches give the wanted gradients: (own, sides) pairs. Both sides share one where registers hold both results."""
    result = []
    for own in "qk":
        sides = tuple(int(name[1]) for name in wrt if name[0] == own)
        if len(sides) == 2 and (
            one_side
            or chunked(problem)
            or head_dim_class(problem.head_dim1) + head_dim_class(problem.head_dim2) > 256
            or (own == "k" and problem.heads_k1 != problem.heads_k2)
        ):
            result += [(own, sides[:1]), (own, sides[1:])]
        elif sides:
            result.append((own, sides))
    return result


def _forward_rows(problem: Problem) -> list[Specialisation]:
    if chunked(problem):
        return [_chunked_row("forward_chunked", problem.dtype, t, "KEYS") for t in CHUNKED_FORWARD]
    return [_forward_row(problem.dtype, head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2), t) for t in FORWARD]


def _backward_rows(problem: Problem, own: str, sides: tuple[int, ...]) -> list[Specialisation]:
    if chunked(problem):
        streamed = "KEYS" if own == "q" else "QUERIES"
        return [_chunked_row(f"backward_d{own}_chunked", problem.dtype, t, streamed, sides[0]) for t in CHUNKED_BACKWARD]
    d1, d2 = head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)
    result = sum((d1, d2)[side - 1] for side in sides)
    table = BACKWARD_BOTH if len(sides) == 2 else BACKWARD_NARROW if result <= 64 else BACKWARD if result <= 128 else BACKWARD_WIDE
    return [_backward_row(own, problem.dtype, d1, d2, sides, t) for t in table]


def _forward_row(dtype: str, d1: int, d2: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), *_shape(tile, "KEYS"))
    shared = 2 * (tile.rows * (d1 + d2) + tile.stages * tile.streamed * max(d1, d2))
    return Specialisation("forward_sm80.cu", "forward", tile, defines, shared, SPILL_BUDGET)


def _backward_row(own: str, dtype: str, d1: int, d2: int, sides: tuple[int, ...], tile: Tile) -> Specialisation:
    streamed = "KEYS" if own == "q" else "QUERIES"
    defines = (("ELEMENT", ELEMENTS[dtype]), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), ("SIDES", sum(sides)), *_shape(tile, streamed))
    shared = 2 * (tile.rows * (d1 + d2) + tile.stages * tile.streamed * max(d1, d2))
    shared += tile.rows * STATS_BYTES if own == "q" else tile.streamed * TERMS_BYTES
    return Specialisation(f"backward_d{own}_sm80.cu", f"backward_d{own}", tile, defines, shared, SPILL_BUDGET)


def _chunked_row(entry: str, dtype: str, tile: Tile, streamed: str, side: int | None = None) -> Specialisation:
    item = 4 if dtype == "float32" else 2
    defines = (("ELEMENT", ELEMENTS[dtype]), *(d for d in _shape(tile, streamed) if d[0] != "STAGES"), ("CHUNK", CHUNK_BYTES // item))
    shared = tile.stages * (tile.rows + tile.streamed) * CHUNK_BYTES
    if side is not None:
        defines += (("SIDES", side), ("RESULT", tile.result))
        shared += tile.stages * tile.streamed * tile.result * item
        shared += tile.rows * STATS_BYTES if streamed == "KEYS" else tile.streamed * TERMS_BYTES
    return Specialisation(f"{entry}.cu", entry, tile, defines, shared, SPILL_BUDGET)


def _shape(tile: Tile, streamed: str):
    return (
        ("WARPS", tile.warps),
        ("ROW_BLOCKS", tile.row_blocks),
        (streamed, tile.streamed),
        ("STAGES", tile.stages),
        ("MIN_BLOCKS", tile.min_blocks),
    )


def every_row(full: bool = False) -> Iterator[Specialisation]:
    """Every row of the table in every head-dimension class that takes it: each file, dtype and class at least once, or, `full`,
    the whole product with the two sides' classes and dtypes; of the Hopper rows both dtypes always, and one pair of classes that
    differ. What CI compiles."""
    yield from (row for dtype in ELEMENTS for row in _every_chunked_row(dtype))
    dtypes = ("float16", "bfloat16")
    for index, d1 in enumerate(HEAD_DIM_CLASSES):
        once = (d1, 64) if d1 == tiles_sm90.HEAD_DIM else (d1,)
        for d2 in HEAD_DIM_CLASSES if full else once:
            rows = {dtype: list(_every_plain_row(dtype, d1, d2)) for dtype in dtypes}
            for number, pair in enumerate(zip(*rows.values(), strict=True)):
                yield from pair if full or pair[0].accelerated else (pair[(index + number) % 2],)


def _every_plain_row(dtype: str, d1: int, d2: int) -> Iterator[Specialisation]:
    problem = Problem("bhsd", dtype, 1, 1, 1, 1, 1, 1, d1, d2, 1.0, 1.0)
    yield from _forward_rows(problem)
    yield from tiles_sm90.every_row(dtype, d1, d2)
    for own, sides in (("q", (1,)), ("k", (1,)), ("q", (2,)), ("k", (2,)), *launches(problem, ("q1", "k1", "q2", "k2"))):
        yield from _backward_rows(problem, own, sides)


def _every_chunked_row(dtype: str) -> Iterator[Specialisation]:
    problem = Problem("bhsd", dtype, 1, 1, 1, 1, 1, 1, 576, 576, 1.0, 1.0)
    yield from _forward_rows(problem)
    for own, sides in (("q", (1,)), ("k", (1,)), ("q", (2,)), ("k", (2,))):
        yield from _backward_rows(problem, own, sides)
