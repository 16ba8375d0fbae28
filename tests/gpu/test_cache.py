"""The disk cache, without a GPU: hits, damage, directories that cannot be written to, threads and processes."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import threading
import warnings

import pytest

from streamkl_cupy.gpu import cache
from streamkl_cupy.gpu import compile as jit

KERNEL = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = VALUE; }\n'
OTHER_PROCESS = """
import json, sys
from streamkl_cupy.gpu import compile as jit
if sys.argv[2] == "never":
    def refuse(*arguments):
        raise AssertionError("compiled")
    jit._compile = refuse
compiled = jit.build(sys.argv[1], {"VALUE": 1}, "sm_80")
print(json.dumps([compiled.from_cache, str(compiled.path), compiled.entries["tiny"].registers, len(compiled.cubin)]))
"""


@pytest.fixture
def kernel(nvrtc, write, monkeypatch):
    monkeypatch.setattr(cache, "_warned", False)
    return write("tiny.cu", KERNEL)


@pytest.fixture
def compilations(kernel, monkeypatch):
    """A list that grows by one with every compilation."""
    made, compile_really = [], jit._compile

    def count(*arguments):
        made.append(arguments[1])
        return compile_really(*arguments)

    monkeypatch.setattr(jit, "_compile", count)
    return made


def build(kernel, value=1, arch="sm_80"):
    """As a new process would: without the memo."""
    jit._built.clear()
    return jit.build(kernel, {"VALUE": value}, arch)


def start(kernel, compiles):
    return subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, kernel, compiles], stdout=subprocess.PIPE, text=True)


def finish(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output)


def test_the_directory_comes_from_one_variable_or_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.directory() == pathlib.Path("/home/someone/.cache/streamkl_cupy")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache.directory() == pathlib.Path("/home/someone/.cache/streamkl_cupy")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.directory() == pathlib.Path("/elsewhere/streamkl_cupy")
    monkeypatch.setenv(cache.VARIABLE, "~/kernels")
    assert cache.directory() == pathlib.Path("/home/someone/kernels")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.VARIABLE, "here")
    assert cache.directory() == tmp_path / "here"
    monkeypatch.setenv(cache.VARIABLE, "")
    assert cache.directory() == pathlib.Path("/elsewhere/streamkl_cupy")


def test_a_second_process_does_not_compile(kernel):
    first = build(kernel)
    written = first.path.stat().st_mtime_ns
    assert not first.from_cache
    assert finish(start(kernel, "never")) == [True, str(first.path), first.entries["tiny"].registers, len(first.cubin)]
    assert first.path.stat().st_mtime_ns == written


def test_a_hit_gives_what_was_compiled_with_its_log(kernel, compilations):
    first, second = build(kernel), build(kernel)
    assert (first.from_cache, second.from_cache) == (False, True) and len(compilations) == 1
    assert (second.cubin, second.log, second.entries, second.path) == (first.cubin, first.log, first.entries, first.path)
    assert jit.build(kernel, {"VALUE": 1}, "sm_80") is second


def test_everything_that_matters_is_in_the_key(kernel, compilations, write, monkeypatch, nvrtc):
    paths = {build(kernel).path, build(kernel, value=2).path, build(kernel, arch="sm_86").path}
    write("tiny.cu", KERNEL + "// another text\n")
    paths.add(build(kernel).path)
    write("header.cuh", "#pragma once\n")
    write("tiny.cu", '#include "header.cuh"\n' + KERNEL)
    paths.add(build(kernel).path)
    write("header.cuh", "#pragma once\n// another text\n")
    paths.add(build(kernel).path)
    version = nvrtc.getVersion()
    monkeypatch.setattr(jit, "import_nvrtc", lambda: (nvrtc, (version[0], version[1] + 1)))
    paths.add(build(kernel).path)
    assert len(paths) == len(compilations) == 7


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_binary_is_rebuilt(kernel, compilations, damage):
    first = build(kernel)
    content = first.cubin
    if damage == "missing":
        first.path.unlink()
    else:
        first.path.write_bytes({"truncated": content[:-1], "flipped": content[:100] + b"\xff" + content[101:], "empty": b""}[damage])
    again = build(kernel)
    assert not again.from_cache and len(compilations) == 2
    assert again.path.read_bytes() == again.cubin and build(kernel).from_cache


@pytest.mark.parametrize("damage", ["truncated", "not json", "another key", "no log", "a list", "binary", "missing"])
def test_a_damaged_or_foreign_record_is_rebuilt(kernel, compilations, damage):
    first = build(kernel)
    (path,) = first.path.parent.glob("*.json")
    record = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "truncated": path.read_bytes()[:-5],
                "not json": b"hello",
                "another key": json.dumps({**record, "key": "0" * 64}).encode(),
                "no log": json.dumps({"key": record["key"], "sha256": record["sha256"]}).encode(),
                "a list": b"[1, 2]",
                "binary": b"\xff\xfe\x00",
            }[damage]
        )
    assert not build(kernel).from_cache and len(compilations) == 2
    assert build(kernel).from_cache and len(compilations) == 2


def test_an_entry_that_points_at_a_foreign_binary_is_rebuilt(kernel, compilations):
    first, other = build(kernel), build(kernel, value=2)
    first.path.write_bytes(other.cubin)
    assert build(kernel).cubin == first.cubin and len(compilations) == 3


def test_nothing_but_entries_is_left_behind(kernel):
    first = build(kernel)
    assert sorted(p.suffix for p in first.path.parent.iterdir()) == [".cubin", ".json"]


def refuse(number):
    def operation(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return operation


@pytest.mark.parametrize("operation, number", [("replace", errno.EROFS), ("replace", errno.EACCES), ("fsync", errno.ENOSPC)])
def test_a_directory_that_cannot_be_written_warns_once_and_works(kernel, compilations, monkeypatch, operation, number):
    place = cache.directory()
    really = getattr(os, operation)

    def only_there(*arguments):
        target = os.readlink(f"/proc/self/fd/{arguments[0]}") if operation == "fsync" else str(arguments[0])
        if target.startswith(str(place)):
            refuse(number)()
        return really(*arguments)

    monkeypatch.setattr(os, operation, only_there)
    with pytest.warns(RuntimeWarning, match=r"kernel cache .*cache cannot be written to.*STREAMKL_CUPY_CACHE_DIR"):
        first = build(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = build(kernel, value=2)
    assert first.path.read_bytes() == first.cubin and place not in first.path.parents
    assert first.path.parent == second.path.parent and len(compilations) == 2
    assert not list(place.iterdir()), "a temporary file was left behind"


def test_a_path_below_a_file_warns_and_works(kernel, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="file/cache cannot be written to"):
        assert build(kernel).path.is_file()


def test_a_filled_cache_that_is_read_only_is_used_without_a_warning(kernel, compilations, monkeypatch):
    build(kernel)
    monkeypatch.setattr(os, "replace", refuse(errno.EROFS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(kernel).from_cache and len(compilations) == 1


def test_no_place_at_all_is_an_error_that_names_the_variable(kernel, monkeypatch):
    monkeypatch.setattr(os, "replace", refuse(errno.ENOSPC))
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(RuntimeError, match=r"stored neither in .* nor in a temporary directory .*No space left.*STREAMKL_CUPY_CACHE_DIR"),
    ):
        build(kernel)


def test_the_temporary_directory_ends_with_the_process(kernel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    from_cache, path, *_ = finish(start(kernel, "compiles"))
    assert not from_cache and pathlib.Path(path).parents[1] == tmp_path
    assert not pathlib.Path(path).parent.exists()


def test_many_threads_compile_a_kernel_once(kernel, compilations):
    jit._built.clear()
    together, results = threading.Barrier(8), []

    def work(value):
        together.wait()
        results.append((value, jit.build(kernel, {"VALUE": value}, "sm_80")))

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(compilations) == 2
    assert len({id(compiled) for _, compiled in results}) == 2


def test_two_processes_at_once_both_succeed(kernel):
    processes = [start(kernel, "compiles") for _ in range(2)]
    results = [finish(process) for process in processes]
    assert all(pathlib.Path(path).stat().st_size == size for _, path, _, size in results)
    assert build(kernel).from_cache


def test_the_directory_may_disappear_while_the_process_lives(kernel, compilations):
    first = build(kernel)
    for path in first.path.parent.iterdir():
        path.unlink()
    first.path.parent.rmdir()
    assert build(kernel).path.is_file() and len(compilations) == 2
