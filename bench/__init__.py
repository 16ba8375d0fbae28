"""Microbenchmarks: `python -m bench --help`, from the repository's root. Not part of the wheel.

The numbers behind the README are made again, on any card, by

    python -m bench all --heads 16,32 --seqlen-q 4k,8k,16k,32k,64k --compare-paper --json bench/results/CARD.json
    python -m bench readme

bench/results/README.md says what can be left out to save time.
"""
