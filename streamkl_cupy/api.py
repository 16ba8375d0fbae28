"""The public functions: the order of events, and nothing else.

Inputs are viewed and checked, then what is written is checked or allocated, then a backend runs, then results are delivered.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

from . import inputs as arguments
from . import outputs
from .arrays import view
from .explain import Explanation
from .frameworks import framework_for, stream_pointer
from .inputs import Call
from .state import Array, Gradients, KLState, RowStats


def forward(
    q1: Array,
    k1: Array,
    q2: Array,
    k2: Array,
    *,
    layout: str = "bhsd",
    scale1: float | None = None,
    scale2: float | None = None,
    causal: bool = False,
    q_offset: int | Array | None = None,
    window: tuple[int, int] = (-1, -1),
    seqlens_q: Array | None = None,
    seqlens_k: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    reduction: str = "none",
    out: KLState | None = None,
    workspace: Array | None = None,
    stream: Any = None,
    **foreign,
) -> tuple[Array, KLState]:
    """KL(P1 || P2) of every query row, where P_t = softmax(scale_t Q_t K_t^T) over the keys that the row sees.

    Arguments:
        q1, k1, q2, k2: float16, bfloat16 or float32, all four of one dtype on one device: `(B, H, Nq, D1)`, `(B, Hk1, Nk, D1)`,
            `(B, H, Nq, D2)`, `(B, Hk2, Nk, D2)`; each Hk divides H, D up to 576. NumPy, CuPy, PyTorch, JAX, or anything with
            `__dlpack__`. CPU arrays run in NumPy. Tensors that require grad are taken by value. On a GPU, inputs whose last axis
            is not contiguous, whose rows are not aligned to 16 bytes, or whose D is no multiple of 8 are copied once a call.
        layout: "bhsd"; "bshd"; "sbhd"; or "thd", packed: q `(total_q, H, D)`, k `(total_k, Hk, D)`.
        scale1, scale2: positive host numbers, D_t ** -0.5 by default.
        causal: key j is visible to row i iff j <= i + q_offset.
        q_offset: an int, or int32 `(B,)`; None means seqlen_k - seqlen_q of each batch element or segment (bottom-right).
        window: (left, right) keys around i + q_offset, -1 for an open side.
        seqlens_q, seqlens_k: valid lengths of a padded batch, int32 `(B,)`.
        cu_seqlens_q, cu_seqlens_k: starts of the packed segments and a final end, int32 `(B + 1,)`.
        reduction: "none"; "sum"; "mean", over the rows that see a key. Never divided by Nk.
        out: the state of an earlier call with the same row shape, reduction, framework and device, refilled in place.
        workspace: a contiguous uint8 buffer of at least `workspace_size(...)` bytes.
        stream: a stream of CuPy or PyTorch, or a pointer; the framework's current one by default.

    Returns:
        `kl`, float32, in nats: `(B, H, Nq)`, `(H, total_q)` when packed, or a scalar array after a reduction; and the state that
        `backward` takes. Both are in q1's framework (arrays of unknown ones give NumPy or CuPy arrays). The state refers to the
        inputs: leave them as they are until `backward`.

    Raises, before anything is written or launched:
        TypeError: wrong kind of object or dtype.
        ValueError: wrong shape, stride, range or device, or outputs that overlap inputs.
        RuntimeError: CUDA arrays without a usable GPU, CuPy or NVRTC.

    >>> import numpy as np
    >>> q, k = np.eye(3, 8, dtype=np.float32)[None, None], np.eye(5, 8, dtype=np.float32)[None, None]
    >>> kl, state = forward(q, k, q, k, causal=True)
    >>> kl.shape, float(abs(kl).max())
    ((1, 1, 3), 0.0)
    """
    if foreign:
        arguments.refuse("forward", foreign)
    options = {"layout": layout, "scale1": scale1, "scale2": scale2, "causal": causal, "q_offset": q_offset, "window": window}
    options |= {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    inputs, options = arguments.split((q1, k1, q2, k2), options | {"reduction": reduction})
    call = arguments.open_call(inputs, options, stream)
    with call.framework.current(call.chosen_stream):
        backend = _backend(call.framework)
        backend.check_values(call.problem, call.views)
        rows = None if out is None else outputs.given_rows(call.problem, call.framework, out)
        written = {} if rows is None else rows.all_views
        call = _with_workspace(call, workspace, lambda: backend.forward_bytes(call.problem, call.views))
        _check_overlaps(call, written, call.views)
        rows = rows or outputs.new_rows(call.problem, call.framework)
        backend.forward(call, rows.views, rows.reduced_views)
        call.framework.hold(call.views.values(), call.stream)
        stats, reduced = (out.rows, rows.reduced) if out is not None else rows.delivered(call.framework, q1)
    return (stats.kl if reduced is None else reduced[0]), KLState(stats, call.problem, inputs, reduced)


def backward(
    state: KLState,
    grad_kl: Array | float | None = None,
    *,
    wrt: str | Iterable[str] = ("q2", "k2"),
    dtype: Any = None,
    deterministic: bool = False,
    out: Gradients | None = None,
    workspace: Array | None = None,
    stream: Any = None,
    **foreign,
) -> Gradients:
    """Gradients of `sum(grad_kl * kl)` with respect to any of the inputs, by recomputing the logits tile by tile.

    Arguments:
        state: what `forward` returned, or one rebuilt from its parts, or `state.with_rows(merge(...))` for a shard of the keys.
        grad_kl: None for 1; an array with one value a row (float16, bfloat16, float32 or float64, any strides, also 0); or a
            scalar, on the host or on the device, which is all that is taken after a reduction.
        wrt: names out of "q1", "k1", "q2", "k2".
        dtype: of the gradients: the inputs' (None) or "float32".
        deterministic: the same bits on every run.
        out: the Gradients of an earlier call on the same problem, refilled in place; only those that `wrt` names.
        workspace, stream: as for `forward`.

    Returns:
        `Gradients`, in the shapes of the inputs and q1's framework; None where not asked for. Rows and keys without a partner get
        zeros.

    Raises, before anything is written or launched: TypeError, ValueError and RuntimeError as `forward`.

    >>> import numpy as np
    >>> q, k = np.eye(3, 8, dtype=np.float32)[None, None], np.eye(5, 8, dtype=np.float32)[None, None]
    >>> _, state = forward(q, k, 2 * q, k)
    >>> grads = backward(state, wrt="q2")
    >>> grads.q2.shape, grads.k2 is None
    ((1, 1, 3, 8), True)
    """
    if foreign:
        arguments.refuse("backward", foreign)
    call = arguments.reopen_call(state, stream)
    wrt = arguments.wanted(wrt)
    dtype = arguments.gradient_dtype(dtype, call.problem.dtype)
    deterministic = arguments.flag("deterministic", deterministic)
    rows = outputs.row_views("state", call.problem, call.framework, state.rows, call.stream)
    weights = arguments.upstream_weights(grad_kl, call)
    # Only a mean puts a factor on the gradients; it is made again where the state has none.
    mean = call.problem.reduction == "mean"
    reduced = outputs.reduced_scalars("state", call.framework, state.reduced, call.stream) if mean else None
    with call.framework.current(call.chosen_stream):
        backend = _backend(call.framework)
        backend.check_values(call.problem, call.views)
        grads, views = (None, {}) if out is None else outputs.given_gradients(call.problem, call.framework, wrt, dtype, out)
        call = _with_workspace(call, workspace, lambda: backend.backward_bytes(call.problem, call.views, wrt, dtype, deterministic))
        read = call.views | outputs.named("state.rows", rows) | ({"grad_kl": weights} if hasattr(weights, "pointer") else {})
        read |= zip(("state.reduced[0]", "state.reduced[1]"), reduced or (), strict=False)
        _check_overlaps(call, {f"out.{name}": v for name, v in views.items()}, read)
        if grads is None:
            grads, views = outputs.new_gradients(call.problem, call.framework, wrt, dtype)
        recompute = mean and reduced is None
        _, reduced = outputs.new_reduced(call.framework) if recompute else (None, reduced)
        backend.backward(call, rows, weights, reduced, views, deterministic, recompute)
        call.framework.hold((*read.values(), *(reduced if recompute else ())), call.stream)
        if out is None:
            grads = Gradients(*(g if g is None else call.framework.deliver(g, state.inputs.q1) for g in grads))
    return grads


def merge(rows_list: Iterable[RowStats], *, stream: Any = None, **foreign) -> RowStats:
    """Statistics of the same query rows over all keys, from those over disjoint shards of the keys.

    Arguments:
        rows_list: `state.rows` of each shard, in any order; a shard that starts at global key k0 is a call with
            `q_offset = global offset - k0` and clipped lengths.
        stream: as for `forward`.

    Returns:
        New `RowStats` in the framework of the first. `backward(shard.with_rows(merged))` gives a shard's dK, and its share of dQ.

    Raises TypeError and ValueError as `forward`.

    >>> import numpy as np
    >>> q, k = np.eye(3, 8, dtype=np.float32)[None, None], np.eye(6, 8, dtype=np.float32)[None, None]
    >>> halves = [forward(q, k[:, :, at], 2 * q, k[:, :, at])[1] for at in (slice(0, 3), slice(3, 6))]
    >>> whole, _ = forward(q, k, 2 * q, k)
    >>> bool(np.allclose(merge([half.rows for half in halves]).kl, whole, atol=1e-6))
    True
    """
    if foreign:
        arguments.refuse("merge", foreign)
    if isinstance(rows_list, RowStats) or not isinstance(rows_list, Iterable):
        raise TypeError(f"rows_list is a {type(rows_list).__name__}; it takes a list of RowStats")
    shards = list(rows_list)
    if not shards:
        raise ValueError("rows_list is empty; it takes one RowStats or more")
    for i, shard in enumerate(shards):
        if not isinstance(shard, RowStats):
            raise TypeError(f"rows_list[{i}] is a {type(shard).__name__}; it takes a RowStats (state.rows)")
    chosen = stream_pointer(stream)
    first = view("rows_list[0].kl", shards[0].kl, chosen)
    arguments.check_stream(stream, "rows_list[0].kl", first)
    framework = framework_for(first.framework, first.device)
    launch = framework.stream() if chosen is None else chosen
    parts = outputs.merge_parts(shards, first, launch)
    with framework.current(chosen):
        merged = framework.empty_parts(5, first.shape)
        target = dict(zip(RowStats._fields, (v for _, v in merged), strict=True))
        _backend(framework).merge(parts, target, first.shape, launch)
        framework.hold([v for part in parts for v in part.values()], launch)
        return RowStats(*(framework.deliver(array, shards[0].kl) for array, _ in merged))


def workspace_size(
    q1: Array, k1: Array, q2: Array, k2: Array, *, wrt: str | Iterable[str] | None = None, deterministic: bool = False, **options
) -> int:
    """Bytes of workspace that `forward` takes, and `backward` as well where `wrt` is given (for gradients of either dtype).

    With `deterministic` it is that of `backward(deterministic=True)`, which never takes more.

    Takes the options of `forward`, and its errors. 0 on the CPU.

    >>> import numpy as np
    >>> q = np.zeros((1, 1, 3, 8), np.float32)
    >>> workspace_size(q, q, q, q, causal=True, wrt="k2")
    0
    """
    deterministic = arguments.flag("deterministic", deterministic)
    call = _open("workspace_size", (q1, k1, q2, k2), options)
    with call.framework.current(None):
        backend = _backend(call.framework)
        sizes = [backend.forward_bytes(call.problem, call.views)]
        if wrt is not None:
            names = arguments.wanted(wrt)
            dtypes = (call.problem.dtype, "float32")
            sizes += [backend.backward_bytes(call.problem, call.views, names, dtype, deterministic) for dtype in dtypes]
    return max(sizes)


def warmup(q1: Array, k1: Array, q2: Array, k2: Array, *, wrt: str | Iterable[str] = ("q2", "k2"), dtype: Any = None, **options) -> None:
    """Compiles and loads what `forward` and `backward` launch for such arguments, so that both can be captured in a CUDA graph.

    Takes the options of `forward`, and its errors. Results are not computed, but inputs that are copied first are
    copied, and as much memory is allocated as the calls would; on the CPU there is nothing to do.

    >>> import numpy as np
    >>> q = np.zeros((1, 1, 3, 8), np.float32)
    >>> warmup(q, q, q, q, causal=True)
    """
    call = _open("warmup", (q1, k1, q2, k2), options)
    names, dtype = arguments.wanted(wrt), arguments.gradient_dtype(dtype, call.problem.dtype)
    with call.framework.current(None):
        _backend(call.framework).warm(call, names, dtype)


def explain(
    q1: Array, k1: Array, q2: Array, k2: Array, *, wrt: str | Iterable[str] = ("q2", "k2"), dtype: Any = None, **options
) -> Explanation:
    """What `forward` and `backward` would run for such arguments: backend, kernels, tiles, splits, bytes. `print` it.

    Takes the options of `forward`, and its errors. Nothing is compiled or computed.

    >>> import numpy as np
    >>> q = np.zeros((1, 1, 3, 8), np.float32)
    >>> print(explain(q, q, q, q).lines[0])
    KL over 3 rows and 3 keys: float32, layout bhsd, B 1, H 1, Hk 1 and 1, D 8 and 8, on cpu
    """
    call = _open("explain", (q1, k1, q2, k2), options)
    names, dtype = arguments.wanted(wrt), arguments.gradient_dtype(dtype, call.problem.dtype)
    with call.framework.current(None):
        return Explanation.of(call, _backend(call.framework).explain(call, names, dtype))


def _open(function: str, matrices, options) -> Call:
    if foreign := options.keys() - arguments.OPTIONS:
        arguments.refuse(function, sorted(foreign))
    call = arguments.open_call(*arguments.split(matrices, options), None)
    _backend(call.framework).check_values(call.problem, call.views)
    return call


@functools.cache
def _backend(framework):
    """The module that runs calls on the arrays of a framework, imported when there is something for it to do."""
    return importlib.import_module(".on_host" if framework.device[0] == "cpu" else ".on_device", __package__)


def _with_workspace(call: Call, workspace: Any, needed) -> Call:
    if workspace is None:
        return call
    return call._replace(workspace=outputs.workspace_view(workspace, call.framework, needed()))


def _check_overlaps(call: Call, written, read) -> None:
    if call.workspace is not None:
        written = written | {"workspace": call.workspace}
    if written:
        outputs.check_overlaps(written, read)
