"""The arguments of a call, looked at once: views of the arrays, the framework and stream of q1, upstream weights, names."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .arrays import BFLOAT16, ArrayView, check_alignment, view
from .checks import FLOAT32_MAX, SIDES, VECTORS, check_flag, check_wrt, describe_device, host_float
from .frameworks import Framework, framework_for, stream_pointer
from .problem import Problem
from .state import Inputs, KLState

WEIGHT_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Call(NamedTuple):
    """A validated call. `views` has the inputs and those vectors that there are; `stream` is a pointer, 0 on the CPU."""

    problem: Problem
    views: dict[str, ArrayView]
    framework: Framework
    stream: int
    chosen_stream: int | None
    workspace: ArrayView | None = None


def split(matrices: tuple[Any, ...], options: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """The arrays among the arguments of `forward`, and the rest. `q_offset` may be either."""
    rest = {name: value for name, value in options.items() if name not in VECTORS}
    vectors = {name: options.get(name) for name in VECTORS}
    q_offset = vectors["q_offset"]
    if isinstance(q_offset, numbers.Integral) or not hasattr(q_offset, "__dlpack__"):
        vectors["q_offset"], rest["q_offset"] = None, q_offset
    return Inputs(*matrices, **vectors), rest


def open_call(inputs: Inputs, options: dict[str, Any], stream: Any) -> Call:
    """Views and checks the inputs; `options` are those of `Problem.check` that are no arrays."""
    chosen = stream_pointer(stream)
    q1 = view("q1", inputs.q1, chosen)
    framework = framework_for(q1.framework, q1.device)
    check_stream(stream, "q1", q1)
    launch = framework.stream() if chosen is None else chosen
    views = {"q1": q1}
    for name, array in zip(Inputs._fields, inputs, strict=True):
        if array is not None and name != "q1":
            views[name] = view(name, array, launch)
    for name in SIDES:
        if name not in views:
            raise TypeError(f"{name} is None; it takes an array")
    vectors = {name: views[name] for name in VECTORS if name in views}
    problem = Problem.check(*(views[name] for name in SIDES), **(options | vectors))
    for name, vector in vectors.items():
        if vector.shape[0] > 1 and vector.strides[0] != 1:
            raise ValueError(f"{name} has stride {vector.strides[0]}; it takes a contiguous vector")
    return Call(problem, views, framework, launch, chosen)


def check_stream(stream: Any, name: str, first: ArrayView) -> None:
    """ValueError for a stream where there are none."""
    if stream is not None and first.device[0] == "cpu":
        raise ValueError(f"stream is {stream!r}, but {name} is on the CPU; it takes None there")


def reopen_call(state: Any, stream: Any) -> Call:
    """The same for the inputs of a state, which may have been put together by hand."""
    if not isinstance(state, KLState):
        raise TypeError(f"state is a {type(state).__name__}; it takes the KLState that forward returned")
    if not isinstance(state.problem, Problem):
        raise TypeError(f"state.problem is a {type(state.problem).__name__}; it takes a Problem")
    if not isinstance(state.inputs, Inputs):
        raise TypeError(f"state.inputs is a {type(state.inputs).__name__}; it takes an Inputs")
    p = state.problem
    options = {
        "layout": p.layout,
        "scale1": p.scale1,
        "scale2": p.scale2,
        "causal": p.causal,
        "window": p.window,
        "q_offset": None if p.q_offset == "vector" else p.q_offset,
        "reduction": p.reduction,
    }
    call = open_call(state.inputs, options, stream)
    if call.problem != p:
        raise ValueError(f"state.inputs make {call.problem}, but state.problem is {p}; it takes the inputs of the forward call")
    return call


def upstream_weights(grad_kl: Any, call: Call) -> float | ArrayView | None:
    """`grad_kl` as None, a number, or the view of a row array or of a scalar on the device."""
    if grad_kl is None:
        return None
    if isinstance(grad_kl, (bool, np.bool_)):
        raise TypeError("grad_kl is a bool; it takes None, a number or an array")
    if isinstance(grad_kl, np.generic) or (isinstance(grad_kl, np.ndarray) and grad_kl.ndim == 0 and not np.ma.isMA(grad_kl)):
        if grad_kl.dtype.kind not in "iuf" and grad_kl.dtype != BFLOAT16:
            raise TypeError(f"grad_kl has dtype {grad_kl.dtype}; a host scalar takes integers and floating-point numbers")
        return _host_weight(grad_kl)
    if isinstance(grad_kl, numbers.Real):
        return _host_weight(grad_kl)
    v = view("grad_kl", grad_kl, call.stream)
    if v.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"grad_kl has dtype {v.dtype}; it takes {', '.join(WEIGHT_DTYPES)}")
    rows = call.problem.row_shape
    if call.problem.reduction != "none" and v.shape not in ((), (1,)):
        raise ValueError(f"grad_kl has shape {v.shape}; after reduction={call.problem.reduction!r} it takes a scalar")
    if v.shape not in ((), (1,), rows):
        raise ValueError(f"grad_kl has shape {v.shape}; it takes a scalar or {rows}, one value a row")
    if v.device != call.framework.device:
        raise ValueError(
            f"grad_kl is on {describe_device(v.device)} and q1 on {describe_device(call.framework.device)}; all arrays take one device"
        )
    check_alignment("grad_kl", v)
    return v


def _host_weight(grad_kl: Any) -> float:
    number = host_float("grad_kl", grad_kl)
    # An infinity goes through as one; a finite number must not turn into one.
    if abs(number) > FLOAT32_MAX and not (math.isinf(number) and grad_kl == number):
        raise ValueError(f"grad_kl is {grad_kl}; it takes a number in the range of float32")
    return number


def wanted(wrt: Any) -> tuple[str, ...]:
    """`wrt` in the order q1, k1, q2, k2."""
    try:
        names = None if isinstance(wrt, (bytes, dict)) else (wrt,) if isinstance(wrt, str) else tuple(wrt)
    except TypeError:
        names = None
    if names is None:
        raise TypeError(f"wrt is a {type(wrt).__name__}; it takes names out of {', '.join(map(repr, SIDES))}")
    return check_wrt(names)


def gradient_dtype(dtype: Any, inputs_dtype: str) -> str:
    """`dtype` as a name: None or the inputs' own, or float32."""
    if dtype is None:
        return inputs_dtype
    takes = "float32" if inputs_dtype == "float32" else f"the inputs' {inputs_dtype} or float32"
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            raise TypeError(f"dtype is {dtype!r}; it takes None, {takes}") from None
    if name not in (inputs_dtype, "float32"):
        raise TypeError(f"dtype is {name}; it takes {takes}")
    return name


OPTIONS = frozenset(Problem.check.__kwdefaults__)
"""Names of the options that say what is computed. They go with the inputs, everywhere."""

OF_FORWARD = OPTIONS | {"out", "workspace", "stream", *SIDES}

flag = check_flag
"""A switch of a call, by the rule for those of a `Problem`."""


ADVICE = {
    "attn_mask": "use causal, window, seqlens_k or packed segments (cu_seqlens_q, cu_seqlens_k)",
    "bias": "an additive bias on keys is one more column: 1 / scale in q, the bias in k",
    "softcap": "logits are plain scaled products; use the dense computation",
    "dropout_p": "leave it out, the divergence is that of the undropped distributions",
    "sinks": "a sink is one more key, which both sides see",
    "softmax_scale": "use scale1 and scale2",
    "is_causal": "use causal",
    "window_size": "use window=(left, right)",
    "key_value_seq_lengths": "use seqlens_q and seqlens_k",
    "cu_seqlens": "use cu_seqlens_q and cu_seqlens_k, with layout='thd'",
    "max_seqlen_q": "cu_seqlens_q and cu_seqlens_k are all it takes",
    "qkv_format": "use layout, 'bhsd', 'bshd', 'sbhd' or 'thd'",
    "enable_gqa": "head counts are read from the shapes",
    "return_lse": "state.lse1 and state.lse2 hold the denominators",
    "return_attn_probs": "probabilities are never held; state.lse1 and state.lse2 hold their denominators",
    "temperature": "divide scale1 and scale2 by it",
    "eps": "there is no epsilon: the logarithms are never taken of probabilities",
    "log_target": "the distributions come from q1, k1, q2 and k2; for the reverse divergence swap the sides",
    "deterministic": "it is an argument of backward; forward gives the same bits on every run",
    "grad_kl": "it is an argument of backward",
    "grad_output": "use grad_kl",
    "create_graph": "there are no second derivatives",
    "retain_graph": "a state serves any number of backward calls",
}
"""What to do instead of arguments that other attention and divergence calls have, or other functions here."""

ALIASES = {
    alias: name
    for name, aliases in {
        "attn_mask": "mask attention_mask custom_mask key_padding_mask padding_mask block_mask block_table segment_ids",
        "bias": "attn_bias alibi_slopes score_mod rpb",
        "softcap": "logits_soft_cap logit_cap attn_logits_soft_cap",
        "dropout_p": "dropout dropout_rate attention_dropout",
        "sinks": "s_aux sink learnable_sink",
        "softmax_scale": "scale sm_scale scaling",
        "window_size": "local_window_size sliding_window",
        "key_value_seq_lengths": "query_seq_lengths seqused_q seqused_k cache_seqlens",
        "cu_seqlens": "cu_seq_q cu_seq_k cu_seqlens_kv qo_indptr kv_indptr",
        "max_seqlen_q": "max_seqlen_k max_q max_k max_seqlen",
        "qkv_format": "tensor_layout kv_layout input_layout qkv_layout",
        "return_lse": "return_softmax_lse output_logsumexp",
        "return_attn_probs": "need_weights output_attentions return_attn_weights",
        "temperature": "tau T",
        "eps": "epsilon",
        "grad_kl": "wrt dtype",
        "grad_output": "grad_outputs dout do gradient",
    }.items()
    for alias in aliases.split()
}


def refuse(function: str, names: Iterable[str]) -> None:
    """TypeError for keyword arguments that a function does not take."""
    for name in names:
        advice = "it is an argument of forward" if name in OF_FORWARD else ADVICE.get(ALIASES.get(name, name))
        if advice:
            raise TypeError(f"{function}() does not support {name}: {advice}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
