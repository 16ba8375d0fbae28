"""The main job on the CPU: its curve, its check and its exit codes."""

import re

import numpy as np
import pytest

from streamkl_cupy import demo, state


def curve(output: str) -> dict[int, float]:
    return {int(step): float(kl) for step, kl in re.findall(r"^step +(\d+) +KL ([\d.]+) nats$", output, re.MULTILINE)}


def test_ten_steps(capsys):
    assert demo.main(["--device", "cpu", "--steps", "10"]) == 0
    output = capsys.readouterr().out
    points = curve(output)
    assert list(points) == [1, 10]
    assert points[1] == pytest.approx(2.337, rel=0.01) and points[10] == pytest.approx(0.776, rel=0.01)
    lines = output.splitlines()
    assert lines[-2].startswith("check against the float64 reference: passed")
    assert re.fullmatch(r"NumPy backend on .+: 10 steps, [\d.]+ s in all, [\d.]+ ms a step", lines[-1])


def test_the_last_step_is_printed_and_the_seed_counts(capsys):
    first_kl = []
    for seed in ("0", "1"):
        assert demo.main(["--device", "cpu", "--steps", "2", "--seed", seed]) == 0
        points = curve(capsys.readouterr().out)
        assert list(points) == [1, 2]
        first_kl.append(points[1])
    assert first_kl[0] != first_kl[1]


@pytest.mark.parametrize("wrong", ["gradients", "kl"])
def test_a_failed_check_is_an_exit_code(monkeypatch, capsys, wrong):
    def slightly_wrong_forward(*inputs, **options):
        kl, kept = forward(*inputs, **options)
        return kl, state.KLState(kept.rows._replace(kl=kept.rows.kl + 1e-3), kept.problem, kept.inputs, kept.reduced)

    forward, backward = demo.forward, demo.backward
    if wrong == "kl":
        monkeypatch.setattr(demo, "forward", slightly_wrong_forward)
    else:
        monkeypatch.setattr(demo, "backward", lambda kept: state.Gradients(*(None if g is None else g * 1.001 for g in backward(kept))))
    assert demo.main(["--device", "cpu", "--steps", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out


def no_gpu(index):
    raise RuntimeError("no usable GPU: make one visible.")


def test_cuda_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(demo, "device_info", no_gpu)
    assert demo.main(["--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "python -m streamkl_cupy: no usable GPU: make one visible.\n"


def test_auto_without_a_gpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr(demo, "device_info", no_gpu)
    assert demo.choose_machine("auto").arrays is np


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "many"], ["--seed", "-1"], ["--device", "tpu"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        demo.main(arguments)
    assert exit_info.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_adam_is_bias_corrected():
    weight = np.array([1.0, -2.0])
    adam = demo.Adam([weight], rate=0.1)
    adam.step([np.array([5.0, -1e-3])])
    np.testing.assert_allclose(weight, [0.9, -1.9], rtol=1e-5)  # the first step is the rate, whatever the gradient
