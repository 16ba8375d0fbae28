"""The table of tile shapes: which kernel a problem takes, in which shape, and why; checked against the device's shared memory.

A row is one specialisation of one kernel. Rows stand in order of preference; `choose` takes the first whose shared memory fits
and that fills a multiprocessor with as many warps as the best row that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..problem import Problem
from .device import DeviceInfo

HEAD_DIM_CLASSES = (16, 32, 64, 96, 128, 192, 256)
"""Head dimensions are padded in shared memory to one of these; wider ones, and float32, go through the chunked kernels."""

ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float"}
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
STATS_BYTES, TERMS_BYTES = 20, 24
SPILL_BUDGET = 512
"""Bytes of spill stores plus loads a thread that a row may have: outside the main loops they cost nothing that a timing shows."""
HOPPER_SPILL_BUDGET = 32
RESERVED_BYTES = 1024
"""Shared memory that the system takes of every block."""


@dataclass(frozen=True)
class Tile:
    """A block owns `warps * row_blocks * 16` rows; the other side streams by, `streamed` rows at a time, in `stages` slices."""

    warps: int
    row_blocks: int
    streamed: int
    stages: int
    min_blocks: int
    reason: str
    result: int = 0

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True)
class Specialisation:
    """One kernel in one shape: what is compiled, how it is launched, and how much it may spill (bytes of stores and loads)."""

    source: str
    entry: str
    tile: Tile
    defines: tuple[tuple[str, int | str], ...]
    shared_bytes: int
    spill_budget: int
    accelerated: bool = False
    """Compiled for sm_90a, and given tensor maps of the keys."""


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
FORWARD_SM90 = (
    Tile(12, 1, 80, 6, 1, "three warpgroups of 64 rows take turns at products and exponentials; 80 keys are the most that do not spill"),
)
"""For compute capability 9.0. `warps` counts consumers; one more warpgroup copies."""

SM90_HEAD_DIM = 128
"""Wider operands would not fit the registers that hold one side's."""
OWN_TILE_BYTES = 128

BACKWARD_SM90 = (Tile(8, 1, 64, 8, 1, "two warpgroups of 64 rows; 64 of the other side leave registers for logits, result and operands"),)
"""dQ and dK for compute capability 9.0, one side a launch."""

CHUNKED_FORWARD = (Tile(4, 2, 48, 2, 2, "logits take the registers; nothing else stays"),)
CHUNKED_BACKWARD = (Tile(4, 1, 32, 2, 2, "128 columns of result in 64 registers leave room for FFMA's operands", result=128),)
CHUNK_BYTES = 128
"""A row of a chunk: 32 columns of float32, 64 of the 16-bit types."""


def head_dim_class(head_dim: int) -> int:
    return next(c for c in HEAD_DIM_CLASSES if c >= head_dim)


def chunked(problem: Problem) -> bool:
    """Whether the problem takes the chunked kernels."""
    return problem.dtype == "float32" or max(problem.head_dim1, problem.head_dim2) > HEAD_DIM_CLASSES[-1]


def forward(problem: Problem, device: DeviceInfo, tensor_maps: bool) -> Specialisation:
    """The forward kernel of a problem; `tensor_maps`: whether the bulk copy engine can address its keys. RuntimeError where no
    row fits the device."""
    if tensor_maps and hopper(problem, device):
        return choose(_hopper_rows(problem), device)
    return choose(_forward_rows(problem), device)


def hopper(problem: Problem, device: DeviceInfo) -> bool:
    """Whether a problem on this device takes the Hopper forward kernel."""
    return device.capability == (9, 0) and problem.dtype != "float32" and max(problem.head_dim1, problem.head_dim2) <= SM90_HEAD_DIM


def _hopper_rows(problem: Problem) -> list[Specialisation]:
    return [_hopper_row(problem.dtype, head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2), t) for t in FORWARD_SM90]


def _hopper_backward_rows(problem: Problem, own: str, sides: tuple[int, ...]) -> list[Specialisation]:
    d1, d2 = head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)
    return [_hopper_backward_row(own, problem.dtype, d1, d2, sides[0], t) for t in BACKWARD_SM90]


def _hopper_backward_row(own: str, dtype: str, d1: int, d2: int, side: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("SIDE", side), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2))
    defines += (("KEYS" if own == "q" else "QUERIES", tile.streamed), ("STAGES", tile.stages))
    shared = tile.stages * (tile.streamed * 128 * -(-max(d1, d2) // 64) + 16) + tile.rows * 128 * -(-(d1, d2)[side - 1] // 64)
    shared += OWN_TILE_BYTES + (tile.rows * STATS_BYTES if own == "q" else tile.stages // 2 * tile.streamed * TERMS_BYTES)
    return Specialisation(f"backward_d{own}_sm90.cu", f"backward_d{own}_sm90", tile, defines, shared, HOPPER_SPILL_BUDGET, accelerated=True)


def _hopper_row(dtype: str, d1: int, d2: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2))
    defines += (("KEYS", tile.streamed), ("STAGES", tile.stages))
    shared = tile.stages * (tile.streamed * 128 * -(-max(d1, d2) // 64) + 16) + tile.rows * 128 * -(-d2 // 64) + OWN_TILE_BYTES
    return Specialisation("forward_sm90.cu", "forward_sm90", tile, defines, shared, 0, accelerated=True)


def backward(problem: Problem, own: str, sides: tuple[int, ...], device: DeviceInfo, tensor_maps: bool) -> Specialisation:
    """The kernel for dQ (`own` is "q") or dK ("k") of the given sides, in one launch: see `launches`."""
    if tensor_maps and hopper(problem, device):
        return choose(_hopper_backward_rows(problem, own, sides), device)
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


def choose(rows: list[Specialisation], device: DeviceInfo) -> Specialisation:
    def warps(row: Specialisation) -> int:
        blocks = device.shared_memory_per_multiprocessor // (row.shared_bytes + RESERVED_BYTES)
        return min(blocks, row.tile.min_blocks) * row.tile.warps

    fitting = [row for row in rows if row.shared_bytes <= device.shared_memory_per_block]
    if not fitting:
        least = min(row.shared_bytes for row in rows)
        raise RuntimeError(
            f"{rows[0].entry} needs {least} bytes of shared memory a block; {device.name} has {device.shared_memory_per_block}"
        )
    most = max(map(warps, fitting))
    return next(row for row in fitting if warps(row) == most)


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
    the whole product with the two sides' classes and dtypes. What CI compiles."""
    yield from (row for dtype in ELEMENTS for row in _every_chunked_row(dtype))
    dtypes = ("float16", "bfloat16")
    for index, d1 in enumerate(HEAD_DIM_CLASSES):
        for d2 in HEAD_DIM_CLASSES if full else (d1,):
            rows = {dtype: list(_every_plain_row(dtype, d1, d2)) for dtype in dtypes}
            for number, pair in enumerate(zip(*rows.values(), strict=True)):
                yield from pair if full else (pair[(index + number) % 2],)


def _every_plain_row(dtype: str, d1: int, d2: int) -> Iterator[Specialisation]:
    problem = Problem("bhsd", dtype, 1, 1, 1, 1, 1, 1, d1, d2, 1.0, 1.0)
    yield from _forward_rows(problem)
    if max(d1, d2) <= SM90_HEAD_DIM:
        yield from _hopper_rows(problem)
        for own, side in (("q", 1), ("k", 1), ("q", 2), ("k", 2)):
            yield from _hopper_backward_rows(problem, own, (side,))
    for own, sides in (("q", (1,)), ("k", (1,)), ("q", (2,)), ("k", (2,)), *launches(problem, ("q1", "k1", "q2", "k2"))):
        yield from _backward_rows(problem, own, sides)


def _every_chunked_row(dtype: str) -> Iterator[Specialisation]:
    problem = Problem("bhsd", dtype, 1, 1, 1, 1, 1, 1, 576, 576, 1.0, 1.0)
    yield from _forward_rows(problem)
    for own, sides in (("q", (1,)), ("k", (1,)), ("q", (2,)), ("k", (2,))):
        yield from _backward_rows(problem, own, sides)
