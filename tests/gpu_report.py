"""tests/gpu_report.json: what a passing `pytest -m gpu` run on a device leaves behind, with the sources that it ran.

`sources` has the SHA-256 of every .py, .cu and .cuh file under kernels/, streamkl_cupy/ and tests/, so that anyone can tell
whether the report is that of the files at hand: `python -m tests.gpu_report`.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATH = ROOT / "tests" / "gpu_report.json"
DIRECTORIES, SUFFIXES = ("kernels", "streamkl_cupy", "tests"), (".py", ".cu", ".cuh")
COUNTS = ("passed", "failed", "skipped")
OUTCOMES: dict[str, str] = {}


def sources() -> dict[str, str]:
    """Path from the root, and SHA-256, of every source file."""
    files = (f for directory in DIRECTORIES for f in (ROOT / directory).rglob("*") if f.suffix in SUFFIXES)
    return {f.relative_to(ROOT).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)}


def note(report) -> None:
    """Remembers how a phase of a test ended: a failure anywhere fails it, a skip anywhere skips it."""
    if report.failed or OUTCOMES.get(report.nodeid) == "failed":
        OUTCOMES[report.nodeid] = "failed"
    elif report.skipped:
        OUTCOMES[report.nodeid] = "skipped"
    else:
        OUTCOMES.setdefault(report.nodeid, "passed")


def is_whole_run(session) -> bool:
    """Whether the device tests were run, all of them."""
    config = session.config
    chosen = {pathlib.Path(str(argument)).resolve() for argument in config.args}
    return config.option.markexpr == "gpu" and not config.option.keyword and chosen <= {ROOT, ROOT / "tests"}


def write(session) -> None:
    modules = collections.defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for nodeid, outcome in OUTCOMES.items():
        modules[pathlib.PurePosixPath(nodeid.partition("::")[0]).stem.removesuffix("_gpu")][outcome] += 1
    totals = {name: sum(counts[name] for counts in modules.values()) for name in COUNTS}
    if not totals["passed"] or totals["failed"]:
        return
    report = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), **machine(), **totals}
    report |= {"modules": dict(sorted(modules.items())), "sources": sources()}
    PATH.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, str]:
    """The device and the software between it and the tests."""
    import cupy

    from streamkl_cupy.gpu.device import device_info
    from streamkl_cupy.gpu.errors import import_nvrtc

    cuda, kernel_module = cupy.cuda.runtime.driverGetVersion(), pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", kernel_module.read_text()) if kernel_module.is_file() else None
    return {
        "device": device_info(0).name,
        "driver": (found[0] if found else "unknown") + f" (CUDA {cuda // 1000}.{cuda % 1000 // 10})",
        "nvrtc": ".".join(map(str, import_nvrtc()[1])),
        "cupy": cupy.__version__,
        "python": sys.version.partition(" ")[0],
    }


def differences() -> list[str]:
    """The sources that are not those of the report."""
    reported, here = json.loads(PATH.read_text())["sources"], sources()
    return sorted(name for name in reported.keys() | here.keys() if reported.get(name) != here.get(name))


if __name__ == "__main__":
    changed = differences()
    print("\n".join(f"differs from the report: {name}" for name in changed) or "the report is that of these sources")
    sys.exit(bool(changed))
