"""Result files: one JSON document a run, written again after every row, so that an interrupted run keeps what it has.

    {"schema": 1, "machine": {...}, "run": {"date", "command", "commit", "dirty"}, "tuned": {...}, "rows": [...]}

A row has `command` (forward, backward, memory, few-rows, host), `direction`, `case`, `results` by contender (ms, spread, calls,
tflops, gbps, of_cublas, error, extra_bytes, speedup, note), `skipped` by contender, and maybe `cublas`, `sustained` and `copy`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

SCHEMA = 1
FOLDER = Path(__file__).parent / "results"
PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "jax", "fla-core")
QUERIES = {
    "power_limit_w": "power.limit",
    "clock_sm_mhz": "clocks.sm",
    "clock_sm_max_mhz": "clocks.max.sm",
    "clock_memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


class Results:
    """The document of this run. With a path it is on disk after every `add`."""

    def __init__(self, device: str, argv: list[str], path: Path | None = None):
        self.path = path
        self.document = {"schema": SCHEMA, "machine": machine(device), "run": run(argv), "tuned": {}, "rows": []}
        self.write()

    @property
    def rows(self) -> list[dict]:
        return self.document["rows"]

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.document["tuned"] = _tuned()
        self.write()

    def write(self) -> None:
        if self.path is not None:
            temporary = self.path.with_name(self.path.name + ".part")
            temporary.write_text(json.dumps(self.document, indent=1, sort_keys=False) + "\n")
            os.replace(temporary, self.path)


def load(path: Path) -> dict:
    """A document, or ValueError with one line where it is none."""
    try:
        document = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not {"machine", "run", "rows"} <= document.keys():
        raise ValueError(f"{path} is no result file of schema {SCHEMA}")
    return document


def committed() -> list[dict]:
    """The documents in bench/results/, oldest run first."""
    return sorted((load(path) for path in sorted(FOLDER.glob("*.json"))), key=lambda document: document["run"]["date"])


def adopt_tuned(document: dict) -> None:
    """Hands the Triton tiles chosen by committed runs on the same card and Triton to this run's tuner."""
    from . import triton_tune

    for earlier in committed():
        theirs, ours = earlier["machine"], document["machine"]
        if theirs["name"] == ours["name"] and theirs["versions"].get("triton") == ours["versions"].get("triton"):
            triton_tune.adopt(earlier.get("tuned", {}))


def machine(device: str) -> dict:
    """Card or processor, clocks, power limit, driver, versions."""
    about = {"device": device, "name": _processor(), "python": platform.python_version(), "versions": _versions()}
    if device != "cuda":
        return about
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    about |= {
        "host": about["name"],
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "processors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "l2_bytes": properties["l2CacheSize"],
        "cuda_driver_api": cupy.cuda.runtime.driverGetVersion(),
    }
    about["versions"]["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return about | _smi()


def run(argv: list[str]) -> dict:
    """Date (UTC), command line (of absolute paths only the name: the rest is the machine's own) and git state."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["python", "-m", "bench", *words]),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
    }


def _tuned() -> dict:
    from . import triton_tune

    return {key: list(config) for key, config in triton_tune.choices.items()}


def _versions() -> dict:
    import streamkl_cupy

    found = {"streamkl-cupy": streamkl_cupy.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _smi() -> dict:
    answer = _output("nvidia-smi", f"--query-gpu=driver_version,{','.join(QUERIES.values())}", "--format=csv,noheader,nounits", "-i", "0")
    if not answer:
        return {"driver": None}
    driver, *values = (value.strip() for value in answer.splitlines()[0].split(","))
    return {"driver": driver} | {name: _number(value) for name, value in zip(QUERIES, values, strict=False)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _git(*words: str) -> str | None:
    return _output("git", "-C", str(Path(__file__).parent), *words)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine()
    )
