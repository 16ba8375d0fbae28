"""How times are taken, on a clock that calls set."""

import pytest

from bench import timing


class FakeClock:
    """Calls name themselves and take what they say."""

    def __init__(self):
        self.log = []

    def flush(self):
        self.log.append("flush")

    def once(self, call):
        name, ms = call()
        self.log.append(name)
        return ms

    def block(self, call, count):
        name, ms = call()
        self.log.append((name, count))
        return ms


def test_contenders_take_turns_until_their_budget_is_used():
    clock = FakeClock()
    calls = {"a": lambda: ("a", 10.0), "b": lambda: ("b", 100.0)}
    times = timing.interleaved(clock, calls, seconds=0.4, repeat=5, estimate_ms={"a": 10.0, "b": 100.0})
    assert [entry for entry in clock.log if entry != "flush"] == ["a", "b", "a", "b", "a", "a", "a"]
    assert clock.log[::2] == ["flush"] * 7
    assert len(times["a"].calls) == 5 and times["b"].median == 100.0


def test_sustained_blocks_alternate_and_last_half_a_second():
    clock = FakeClock()

    class Gemm:
        flop, estimate_ms = 2e9, 2.0
        call = staticmethod(lambda: ("gemm", 2.0))

    rates = timing.sustained(clock, lambda: ("kernel", 4.0), 2e9, 4.0, Gemm)
    assert [name for name, _ in clock.log] == ["kernel", "gemm"] * 4
    assert all(count * ms >= 500 for (_, count), ms in zip(clock.log, [4.0, 2.0] * 4, strict=True))
    assert rates.ratio == 0.5 and len(rates.kernel) == timing.ROUNDS


def test_the_copy_counts_bytes_read_and_written():
    copy = timing.Copy(timing.CpuClock())
    assert copy.bytes == 2 * timing.COPY_BYTES["cpu"]
    assert 0.1 < copy.bytes / copy.estimate_ms / 1e6 < 2000  # GB/s of any memory


def test_spread_is_half_the_quartile_distance():
    assert timing.Times((1.0, 1.0, 1.0)).spread == 0
    assert timing.Times((9.0, 10.0, 11.0)).spread == pytest.approx(0.05)
    assert timing.Times((9.0,)).spread == 0
