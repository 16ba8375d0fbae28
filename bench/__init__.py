"""Microbenchmarks: `python -m bench --help`. Not part of the wheel."""
