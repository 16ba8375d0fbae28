"""The source of one kernel as one string: includes put in place, so that nothing is looked for on disk when it compiles.

This file alone knows where the kernels lie.
"""

from __future__ import annotations

import re
from pathlib import Path

from .parameters import layout_checks

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


def kernels_directory() -> Path:
    """`streamkl_cupy/kernels` of an installed wheel, else `kernels` at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def assemble(source_name: str) -> str:
    """The text of kernels/`source_name` (or of a path) with every `#include "..."` replaced by the file, once each.

    `#line` keeps the compiler's messages pointing at the files. A header is searched beside the file that includes it, then in
    the kernels directory; conditions around an include are not looked at. Where problem.cuh takes part, the checks of
    `parameters.layout_checks` follow at the end.
    """
    path = kernels_directory() / source_name
    if not path.is_file():
        raise FileNotFoundError(f"there is no kernel source {path}.")
    text = "".join(_flatten(path, set()))
    return text + '#line 1 "layout_checks"\n' + layout_checks(text)


def _flatten(path: Path, included: set[Path]):
    included.add(path.resolve())
    yield f'#line 1 "{path.name}"\n'
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        if PRAGMA_ONCE.match(line):
            yield "\n"
        elif match := INCLUDE.match(line):
            header = next((p for p in (path.parent / match[1], kernels_directory() / match[1]) if p.is_file()), None)
            if header is None:
                raise FileNotFoundError(
                    f'{path.name}:{number} includes "{match[1]}", which is neither beside it nor in {kernels_directory()}.'
                )
            if header.resolve() not in included:
                yield from _flatten(header, included)
            yield f'#line {number + 1} "{path.name}"\n'
        else:
            yield line + "\n"
