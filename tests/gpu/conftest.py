"""What the compiler's tests share: NVRTC on an empty cache, and kernels written on the spot."""

import pytest

from streamkl_cupy.gpu import compile as jit
from streamkl_cupy.gpu import errors


@pytest.fixture
def nvrtc(tmp_path, monkeypatch):
    """NVRTC with an empty disk cache and an empty memo; skips where there is none."""
    try:
        binding, _ = errors.import_nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("STREAMKL_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    jit._built.clear()
    yield binding
    jit._built.clear()


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> path of a source file that `build` takes."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write
