"""What the GPU side says when the machine lacks something: one sentence and the way out."""

from __future__ import annotations

INSTALL = "pip install 'streamkl-cupy[cuda13]' (or [cuda12] for a driver older than 580)"


def import_cupy():
    """CuPy, or a RuntimeError that names the extra to install."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"GPU arrays need CuPy, which does not import here ({error}): {INSTALL}.") from error
    return cupy


def import_nvrtc():
    """CuPy's NVRTC binding and the (major, minor) of the library behind it. Needs no GPU."""
    import_cupy()
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"CuPy finds no NVRTC, the CUDA compiler library that builds the kernels ({' '.join(str(error).split())}): {INSTALL}."
        ) from error
    return nvrtc, tuple(version)


def no_gpu(error: Exception) -> RuntimeError:
    """The error to raise for what the CUDA runtime said when it was asked for a device."""
    said = str(error)
    if "Initialization" in said:
        fix = "this process was forked after CUDA was initialised: start workers with multiprocessing's 'spawn' method"
    elif "InsufficientDriver" in said:
        fix = "there is no NVIDIA driver here, or it is older than CuPy's CUDA: install or update it, or pass CPU arrays"
    elif "InvalidDevice" in said:
        fix = "there is no such device: look at CUDA_VISIBLE_DEVICES"
    else:
        fix = "make a GPU visible to this process (CUDA_VISIBLE_DEVICES), or pass CPU arrays"
    return RuntimeError(f"no usable GPU ({said}): {fix}.")
