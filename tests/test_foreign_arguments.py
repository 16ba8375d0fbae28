"""Arguments that belong elsewhere, in other libraries' calls or in other functions here: an error that says what to do instead."""

import inspect

import pytest

import streamkl_cupy as skl
from streamkl_cupy.inputs import ADVICE, ALIASES

from .test_bad_input import arrays, poisoned_state

FOREIGN = {
    "attn_mask": "seqlens_k",
    "key_padding_mask": "seqlens_k",
    "bias": "one more column",
    "alibi_slopes": "one more column",
    "softcap": "plain scaled products",
    "dropout_p": "undropped",
    "sinks": "one more key",
    "sm_scale": "scale1 and scale2",
    "is_causal": "use causal",
    "window_size": "window=",
    "max_seqlen_k": "cu_seqlens_k",
    "enable_gqa": "head counts",
    "return_softmax_lse": "state.lse1",
    "temperature": "divide scale1",
    "key_value_seq_lengths": "use seqlens_q and seqlens_k",
    "seqused_k": "use seqlens_q and seqlens_k",
    "qo_indptr": "layout='thd'",
    "tensor_layout": "use layout",
    "sliding_window": "window=",
    "logits_soft_cap": "dense computation",
    "need_weights": "never held",
    "log_target": "swap the sides",
    "eps": "no epsilon",
    "grad_kl": "argument of backward",
    "nonsense": "unexpected keyword argument 'nonsense'",
}


@pytest.mark.parametrize(("name", "advice"), FOREIGN.items())
def test_arguments_of_other_libraries(name, advice):
    for function in (skl.forward, skl.workspace_size, skl.warmup, skl.explain):
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*{name}.*") as caught:
            function(**arrays(), **{name: 0.0})
        assert advice in str(caught.value)


@pytest.mark.parametrize("name", ["wrt", "dtype", "deterministic", "grad_kl"])
def test_arguments_of_backward_are_no_arguments_of_forward(name):
    with pytest.raises(TypeError, match=rf"forward\(\) does not support {name}: it is an argument of backward"):
        skl.forward(**arrays(), **{name: None})
    with pytest.raises(TypeError, match=rf"merge\(\) does not support {name}: it is an argument of backward"):
        skl.merge([], **{name: None})


@pytest.mark.parametrize(("name", "advice"), (FOREIGN | {"grad_output": "use grad_kl", "create_graph": "no second derivatives"}).items())
def test_arguments_of_other_libraries_to_backward_and_merge(name, advice):
    state = poisoned_state()
    calls = {"merge": lambda **given: skl.merge([state.rows], **given), "backward": lambda **given: skl.backward(state, **given)}
    for function, call in calls.items():
        if name == "grad_kl" and function == "backward":
            continue
        with pytest.raises(TypeError, match=rf"{function}\(\).*{name}.*") as caught:
            call(**{name: 0.0})
        assert advice in str(caught.value)


@pytest.mark.parametrize("name", inspect.signature(skl.Problem.check).parameters)
def test_arguments_of_forward_are_no_arguments_of_backward_and_merge(name):
    state = poisoned_state()
    for function, call in (
        ("backward", lambda: skl.backward(state, **{name: None})),
        ("merge", lambda: skl.merge([state.rows], **{name: None})),
    ):
        with pytest.raises(TypeError, match=rf"{function}\(\) does not support {name}: it is an argument of forward"):
            call()


@pytest.mark.parametrize("name", ["out", "workspace", "stream"])
def test_what_plans_a_call_takes_nothing_to_write_to(name):
    for function in (skl.workspace_size, skl.warmup, skl.explain):
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) does not support {name}: it is an argument of forward"):
            function(**arrays(), **{name: None})


def test_all_advice_is_given_under_its_own_name_too():
    assert set(ALIASES.values()) <= set(ADVICE) and not set(ALIASES) & set(ADVICE)
    taken = {name for function in (skl.forward, skl.merge) for name in inspect.signature(function).parameters}
    assert not taken & (set(ADVICE) | set(ALIASES))
