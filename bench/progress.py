"""Progress on stderr: a rich bar on a terminal, a line a cell elsewhere or without rich. stdout stays for the table."""

from __future__ import annotations

import sys
import time


class Progress:
    """`say` names what runs now, `advance` ends a cell."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.bar = self.task = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        if self.bar:
            self.bar.update(self.task, description=text)
        else:
            print(f"[{self.done + 1}/{self.total}, {time.monotonic() - self.start:.0f} s] {text}", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.done += 1
        if self.bar:
            self.bar.advance(self.task)
