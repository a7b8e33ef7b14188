"""Numbers of measurements: percentiles, spreads, noise, what was used between two readings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered import TieredStore
from tiered.cli.bench.series import Series
from tiered.errors import TieredError
from tiered.measuring import fio, meters


@pytest.mark.parametrize(
    ("count", "share", "rank"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.5, 50), (100, 0.99, 99), (101, 0.99, 100), (3, 0.99, 3), (7, 1.0, 7)],
)
def test_percentile_is_the_nearest_rank(count: int, share: float, rank: int) -> None:
    assert meters.percentile(range(1, count + 1), share) == rank


def test_spread() -> None:
    assert meters.Spread.of([3.0, 1.0, 2.0]).shown() == "2.00 [1.00 - 3.00]"


def test_noise_is_shares() -> None:
    seen = meters.Noise().seen()
    assert set(seen) == {"others", "own", "steal"}
    assert all(share >= 0 for share in seen.values())


def test_contents_do_not_compress() -> None:
    for nbytes in 1, 4096, (4 << 20) + 1:
        value = meters.bytes_of(nbytes)
        assert value.shape == (nbytes,)
        assert nbytes == 1 or value[:4096].unique().numel() > 200


def test_quantiles() -> None:
    assert meters.quantiles([]) == {}
    assert meters.quantiles(range(1000, 0, -1)) == {"p50": 500, "p99": 990, "p99.9": 999, "max": 1000}


def test_latencies_of_all_rounds_count_together() -> None:
    series = Series("it")
    for latencies in ([1.0] * 98, [2.0, 3.0]):
        series.add(meters.MovedBytes(1, 1.0, 1.0, tuple(latencies)))
    assert series.latency() == {"p50": 1.0, "p99": 2.0, "p99.9": 3.0, "max": 3.0}


def test_ratios_are_those_of_rounds() -> None:
    assert meters.Spread.by([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == meters.Spread(2.0, 0.5, 3.0)


def test_each_is_first_as_often() -> None:
    orders = [order for _, order in meters.turns("abc", 6)]
    assert orders == [list("abc"), list("bca"), list("cab")] * 2


def test_what_was_used_between_two_readings() -> None:
    before = meters.Usage(1.0, 0.5, 10, 20, None, None, 0.25, 0.0)
    after = meters.Usage(3.0, 0.75, 15, 20, 4096, 0, 0.5, 0.125)
    assert before.until(after) == meters.Usage(2.0, 0.25, 5, 0, None, None, 0.25, 0.125)
    assert after.until(after).kernel_bytes == 0


def test_bytes_of_the_disk_are_the_stores_alone() -> None:
    """The kernel counts what the process reads beside the store, and not what the page cache had."""
    beside = meters.Usage(1.0, 0.5, read=0, written=100, kernel_read=2_088_960, kernel_written=4196)
    assert (beside.disk_read, beside.disk_written) == (0, 100)
    cached = meters.Usage(1.0, 0.5, read=4096, written=100, kernel_read=0, kernel_written=50)
    assert (cached.disk_read, cached.disk_written) == (0, 50)
    assert (meters.Usage(1.0, 0.5, 5, 6, None, None).disk_read, cached.counted_by) == (5, "kernel")


@pytest.mark.parametrize("dram", [4 << 20, 1 << 20], ids=["room for all", "room for some"])
def test_the_drive_is_measured_whatever_the_pool(dram: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "LARGEST_PIECE", 64 << 10)
    with TieredStore.open(tmp_path, dram=dram) as store:
        rates = meters.measure(store)
        assert rates is not None
        assert min(rates.read, rates.write) > 0
        assert not [*store]


def test_engines_that_do_not_work_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "ENGINES", ("libaio", "nonsense", "sync"))

    def attempt(engine: str) -> None:
        if engine == "nonsense":
            raise TieredError("there is none")

    assert fio.working(attempt) == (["libaio", "sync"], {"nonsense": "there is none"})
