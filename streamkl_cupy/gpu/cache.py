"""Compiled kernels on disk, and on trust to nobody.

An entry is two files in one flat directory: `<key>.json`, which holds the key, the compiler's log and the SHA-256 of the binary,
and the binary itself, named by key and content so that a reader never pairs one writer's record with another's binary. Both
appear by rename, so any number of processes may share the directory, and it may be deleted at any time. An entry that does not
match its own record is no entry.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

VARIABLE = "STREAMKL_CUPY_CACHE_DIR"

_lock = threading.Lock()
_fallback: Path | None = None
_warned = False


def directory() -> Path:
    """STREAMKL_CUPY_CACHE_DIR, else `streamkl_cupy` below XDG_CACHE_HOME, else `~/.cache/streamkl_cupy`."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "streamkl_cupy"


def read(key: str) -> tuple[Path, bytes, str] | None:
    """Path and bytes of the binary stored under `key`, and its log; None where there is no sound entry."""
    try:
        record = json.loads((directory() / f"{key}.json").read_bytes())
        digest, log = record["sha256"], record["log"]
        if record["key"] != key or not isinstance(log, str):
            return None
        path = _binary_path(directory(), key, digest)
        binary = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (path, binary, log) if hashlib.sha256(binary).hexdigest() == digest else None


def write(key: str, binary: bytes, log: str) -> Path:
    """Stores an entry and returns the binary's path.

    Where the cache directory cannot be written to, warns (once a process) and stores in a directory that ends with the process.
    """
    try:
        return _store(directory(), key, binary, log)
    except OSError as error:
        _warn_once(error)
    try:
        return _store(_process_directory(), key, binary, log)
    except OSError as error:
        raise RuntimeError(
            f"compiled kernels can be stored neither in {directory()} nor in a temporary directory ({error}): "
            f"set {VARIABLE} to a directory with space that this process may write to."
        ) from error


def _binary_path(place: Path, key: str, digest: str) -> Path:
    return place / f"{key[:40]}-{digest[:16]}.cubin"


def _store(place: Path, key: str, binary: bytes, log: str) -> Path:
    digest = hashlib.sha256(binary).hexdigest()
    path = _binary_path(place, key, digest)
    place.mkdir(parents=True, exist_ok=True)
    _replace(path, binary)
    _replace(place / f"{key}.json", json.dumps({"key": key, "sha256": digest, "log": log}).encode())
    return path


def _replace(path: Path, content: bytes) -> None:
    """Writes a file under another name and moves it into place: readers see all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _warn_once(error: OSError) -> None:
    global _warned
    with _lock:
        first, _warned = not _warned, True
    if first:
        warnings.warn(
            f"the kernel cache {directory()} cannot be written to ({error}): kernels compile anew in every process "
            f"until {VARIABLE} names a directory that can.",
            RuntimeWarning,
            stacklevel=2,
        )


def _process_directory() -> Path:
    """A directory of this process, removed when it exits. A fork gets its own."""
    global _fallback
    with _lock:
        if _fallback is None:
            _fallback = Path(tempfile.mkdtemp(prefix="streamkl_cupy-"))
            atexit.register(_remove, _fallback, os.getpid())
        return _fallback


def _remove(place: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(place, ignore_errors=True)


def _after_fork() -> None:
    global _lock, _fallback
    _lock, _fallback = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
