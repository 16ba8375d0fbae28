"""The command line: what may be asked, one line for what may not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import peers
from .cases import ITEM_BYTES, SIDES, parse_size, parse_sizes

COMMANDS = {
    "forward": "time the forward",
    "backward": "time the backward, for every --wrt",
    "memory": "peak extra memory of forward and backward, nothing timed",
    "few-rows": "forward and backward where few query rows meet many keys: bandwidth",
    "host": "host time of a call by framework, and what a captured graph's replay adds",
    "all": "all of these; --seqlen-q and --seqlen-k then hold for forward, backward and memory",
}
EPILOG = "Sizes take k (1024) and m. Lists take commas and run as a product. Progress goes to stderr, one table to stdout. On a CPU the defaults are small: N 256,512, 2 heads, D 64, float32."


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"bench: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; 0, or 1 where the library was wrong or failed on a case, or 2 for a request that cannot be met."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
    try:
        from . import commands

        return commands.run(options, argv)
    except commands.Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m bench", description="Microbenchmarks of streamkl_cupy against every peer that is installed.", epilog=EPILOG
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    shared = _measuring()
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[shared], epilog=EPILOG)
    show = commands.add_parser(
        "show", help="print, plot or compare stored results", description="Print stored results; plot or compare them."
    )
    show.add_argument("results", nargs="+", type=Path, metavar="FILE", help="result files of earlier runs")
    _reporting(show)
    readme = commands.add_parser(
        "readme",
        help="refresh README's tables and figures from bench/results/",
        description="Refresh README's tables and figures from bench/results/*.json; the figures need matplotlib.",
    )
    readme.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table or figure is out of date")
    return top


def _measuring() -> argparse.ArgumentParser:
    shared = Parser(add_help=False)
    shape = shared.add_argument_group("what is computed")
    shape.add_argument("--seqlen-q", type=_of(parse_sizes), metavar="LIST", help="query rows (default 4k,16k; few-rows 1,16,32,64)")
    shape.add_argument(
        "--seqlen-k", type=_of(parse_sizes), metavar="LIST", help="keys (default: as --seqlen-q; few-rows 64k,128k,256k,512k)"
    )
    shape.add_argument("--batch", type=_of(parse_size), default=1, metavar="B", help="batch elements (default 1)")
    shape.add_argument("--heads", type=_of(parse_sizes), metavar="LIST", help="query heads (default 16)")
    shape.add_argument("--kv-heads", type=_of(parse_size), metavar="H", help="key heads, a divisor of --heads (default: as many)")
    shape.add_argument("--head-dim", type=_of(_head_dims), metavar="LIST", help="head dimension, 1 to 576 (default 128)")
    shape.add_argument("--head-dim2", type=_of(_head_dims), metavar="LIST", help="of the second side (default: as --head-dim)")
    shape.add_argument("--dtype", type=_of(_dtypes), metavar="LIST", help="of bfloat16 (default), float16, float32")
    shape.add_argument("--causal", choices=("no", "yes", "both"), help="causal mask (default both; few-rows and host no)")
    shape.add_argument(
        "--window", type=_of(_window), default=(-1, -1), metavar="L,R", help="sliding window, -1 for an open side (write --window=-1,0)"
    )
    shape.add_argument(
        "--wrt", type=_of(_wrt), nargs="+", metavar="LIST",
        help="gradients of the backward, each as q2,k2: setting 1 (default), q1,k1: setting 2, q1,k1,q2,k2 (all: both settings)",
    )  # fmt: skip
    shape.add_argument("--deterministic", action="store_true", help="the library's backward with the same bits on every run")
    shape.add_argument("--portable", action="store_true", help="the library's kernels for other cards, on a Hopper card too")
    how = shared.add_argument_group("how it is measured")
    how.add_argument(
        "--peers", type=_of(_peers), default=None, metavar="LIST", help=f"of {', '.join(peers.MODULES)}; all (default) or none"
    )
    how.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto (default) is the GPU where one is usable, else NumPy"
    )
    how.add_argument("--repeat", type=_of(parse_size), default=30, metavar="N", help="calls of each contender at most (default 30)")
    how.add_argument(
        "--seconds-per-cell", type=_of(_seconds), default=1.0, metavar="S",
        help="budget of each contender's burst times (default 1); a peer whose call would take 5 times that is skipped",
    )  # fmt: skip
    how.add_argument(
        "--sustained", action=argparse.BooleanOptionalAction, default=True,
        help="the ratio to cuBLAS over alternating blocks of half a second, about 4 s a cell, none for few rows (default yes)",
    )  # fmt: skip
    how.add_argument("--json", type=Path, metavar="FILE", help="write the results, again after every row")
    how.add_argument("--explain", action="store_true", help="print the formulas and what the library would run; measure nothing")
    _reporting(how)
    return shared


def _reporting(group) -> None:
    group.add_argument(
        "--plot", type=_of(_picture), metavar="FILE", help="draw the results (.png, .svg or .pdf; a suffix for each kind if several)"
    )
    group.add_argument("--compare-paper", action="store_true", help="print our times against the published ones, shape by shape")


def _of(parse):
    """An argparse type whose ValueErrors keep their own words."""

    def typed(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _head_dims(text: str) -> list[int]:
    sizes = parse_sizes(text)
    if too_large := [size for size in sizes if size > 576]:
        raise ValueError(f"{too_large[0]} is too large; it takes 1 to 576")
    return sizes


def _dtypes(text: str) -> list[str]:
    return [_one_of(name, tuple(ITEM_BYTES)) for name in text.split(",")]


def _wrt(text: str) -> tuple[str, ...]:
    names = [_one_of(name, SIDES) for name in text.split(",")]
    return tuple(side for side in SIDES if side in names)


def _peers(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    if text == "all":
        return tuple(peers.MODULES)
    return tuple(dict.fromkeys(_one_of(name, (*peers.MODULES, "all", "none")) for name in text.split(",")))


def _one_of(name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return name


def _window(text: str) -> tuple[int, int]:
    parts = text.split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ValueError(f"{text!r} is no window; it takes two integers, as 1024,0") from None
    if min(left, right) < -1:
        raise ValueError(f"{text!r} is no window; each side takes -1 (open) or a number of keys")
    return left, right


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"{text!r} is no time; it takes seconds, more than 0")
    return seconds


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{text!r} has no known suffix; it takes .png, .svg or .pdf")
    return path
