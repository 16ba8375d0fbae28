"""README.md: its examples run and print what it says they print, and its maps match the tree.

A comment behind a `print` is what that line prints; prints without one come first. Examples under "Recipes" follow that section's first block; all others
stand alone. Those that import CuPy run on a device only.
"""

import contextlib
import inspect
import io
import re
import subprocess
from pathlib import Path

import pytest

import streamkl_cupy as skl
from streamkl_cupy import demo

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MAPPED, SUFFIXES = ("streamkl_cupy", "kernels", "bench"), (".py", ".cu", ".cuh")
PRINTS = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)


def section(title):
    """What stands below a heading, up to the next one of its level or above."""
    level, _, rest = re.search(rf"^(#+) {re.escape(title)}\n()(.*)", TEXT, re.MULTILINE | re.DOTALL).groups()
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def examples():
    first, *recipes = blocks(section("Recipes"), "python")
    for code in blocks(TEXT, "python"):
        marks = [pytest.mark.gpu] if re.search(r"^import cupy", code, re.MULTILINE) else []
        at = TEXT.count("\n", 0, TEXT.index(code)) + 1
        yield pytest.param(first if code in recipes else "", code, marks=marks, id=f"line {at}")


@pytest.fixture(autouse=True)
def registered_once(monkeypatch):
    """JAX takes a class once a process; several tests run the example that registers ours."""
    with contextlib.suppress(ImportError):
        from jax import tree_util

        def once(register):
            def again(kind, *fields):
                try:
                    return register(kind, *fields)
                except ValueError as error:
                    if "Duplicate" not in str(error):
                        raise

            return again

        for name in ("register_static", "register_dataclass"):
            monkeypatch.setattr(tree_util, name, once(getattr(tree_util, name)))


@pytest.mark.parametrize(("before", "code"), list(examples()))
def test_example(before, code):
    for module in ("torch", "jax"):
        if re.search(rf"^import {module}$", code, re.MULTILINE):
            pytest.importorskip(module)
    namespace, output = {"__name__": "readme"}, io.StringIO()
    exec(before, namespace)
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    said, printed = PRINTS.findall(code), output.getvalue().splitlines()
    assert printed[len(printed) - len(said) :] == said


def test_the_main_jobs_curve(capsys):
    curve = dict(re.findall(r"^step +(\d+) +KL ([\d.]+) nats$", section("Install and run"), re.MULTILINE))
    assert [int(step) for step in curve] == list(demo.REPORTED_STEPS)
    assert demo.main(["--device", "cpu", "--steps", str(demo.REPORTED_STEPS[-1])]) == 0
    ran = dict(re.findall(r"^step +(\d+) +KL ([\d.]+) nats$", capsys.readouterr().out, re.MULTILINE))
    assert {step: float(kl) for step, kl in ran.items()} == {step: pytest.approx(float(kl), rel=0.01) for step, kl in curve.items()}


def test_commands_name_extras_that_exist():
    tomllib = pytest.importorskip("tomllib")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for extras in re.findall(r'"\.\[([\w,]+)\]"', TEXT) for extra in extras.split(",")}
    assert named and named <= known.keys()


def test_every_argument_is_in_the_table():
    table = section("Arguments")
    for function in (skl.forward, skl.backward):
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "state" and parameter.kind is not parameter.VAR_KEYWORD:
                assert re.search(rf"`[^`]*\b{name}\b[^`]*`", table), f"{function.__name__} takes {name}"


def test_every_public_name_is_told():
    assert [name for name in skl.__all__ if name not in TEXT and name != "__version__"] == []


def test_the_state_takes_20_bytes_a_row():
    import numpy as np

    a = np.ones((1, 2, 3, 8), np.float32)
    kl, state = skl.forward(a, a, a, a)
    assert sum(part.nbytes for part in state.rows) == 20 * kl.size


PROMISES = ("Accuracy", "Determinism", "Memory", "Streams", "Errors", "Inputs", "Threads and processes", "Not promised")


@pytest.mark.parametrize("title", PROMISES)
def test_what_is_promised_and_what_is_not(title):
    assert re.search(rf"^\*\*{title}[.*]", section("What is promised"), re.MULTILINE)


REFUSED = (
    "boolean",
    "additive mask",
    "left padding",
    "dropout",
    "sinks",
    "softcap",
    "bias",
    "numbers of query heads",
    "second derivatives",
)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_and_what_to_do_instead(what):
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section("What it does not do"), re.MULTILINE)
    (instead,) = [right for left, right in rows if what in left]
    assert len(instead) > 10


@pytest.mark.parametrize("name", ["attn_mask", "softcap"])
def test_other_libraries_arguments_are_refused(name):
    with pytest.raises(TypeError, match=f"does not support {name}: "):
        skl.forward(None, None, None, None, **{name: None})


def test_environment_variables():
    code = "\n".join(path.read_text() for path in (ROOT / "streamkl_cupy").rglob("*.py"))
    pattern = r"\bSTREAMKL_CUPY_[A-Z_]+"
    assert set(re.findall(pattern, section("What is promised"))) == set(re.findall(pattern, code))


def on_disk():
    return {
        path.relative_to(ROOT).as_posix()
        for folder in MAPPED
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and path.stat().st_size and "__pycache__" not in path.parts
    }


def tracked():
    """The files that git knows; outside a checkout those that there are."""
    try:
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", *MAPPED], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return on_disk()
    return on_disk() & set(listed.split("\0"))


def the_map():
    """Every file that the map names, with what it says about it."""
    folder, named = None, {}
    for line in blocks(section("The map of the house"), "text")[0].splitlines():
        if line.endswith("/") and not line.startswith(" "):
            folder = line
        else:
            name, _, about = line.strip().partition(" ")
            assert folder + name not in named, f"{folder}{name} stands twice in the map"
            named[folder + name] = about.strip()
    return named


def test_the_map_names_every_file_and_no_other():
    named = the_map()
    assert sorted(tracked() - named.keys()) == [], "files without a line in the map"
    assert sorted(named.keys() - on_disk()) == [], "lines in the map without a file"
    assert all(named.values())


def test_the_call_goes_through_files_and_names_that_exist():
    steps = re.findall(r"`([\w/]+\.(?:py|cuh?))`(?: `(\w+)`)?", section("One call, file by file"))
    assert len(steps) > 20
    for path, name in steps:
        source = (ROOT / path).read_text()
        definition = rf"^\s*(?:def|class) {name}\b|\bstruct {name}\b|\b{name}\("
        assert not name or re.search(definition, source, re.MULTILINE), f"{path} has no {name}"


def test_other_paths_exist():
    paths = re.findall(r"`((?:tests|bench|kernels|streamkl_cupy|\.ci)/[\w./]*)`", TEXT)
    assert paths and [path for path in paths if not (ROOT / path).exists() and path != "bench/results/"] == []
