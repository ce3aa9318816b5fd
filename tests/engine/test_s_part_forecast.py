"""The predicted seconds of the S-Part, by hand."""

from __future__ import annotations

import pytest

from fastdecode.engine.scheduling.s_part_forecast import SPartForecast

pytestmark = pytest.mark.quick

MEASURED = {4: 0.010, 1: 0.008, 16: 0.020}


def test_measured_seconds_are_those_of_the_next_size():
    times = SPartForecast(MEASURED)
    assert times.known
    assert [times.seconds(rows) for rows in (1, 2, 4, 5, 16, 32)] == [0.008, 0.010, 0.010, 0.020, 0.020, 0.040]


def test_steps_correct_the_measured_seconds_of_all_sizes():
    times = SPartForecast(MEASURED)
    for _ in range(50):
        times.observe(4, 0.015)
    assert times.seconds(4) == pytest.approx(0.015)
    assert times.seconds(16) == pytest.approx(0.030)
    for _ in range(200):
        times.observe(16, 0.020)
    assert times.seconds(1) == pytest.approx(0.008, rel=1e-3)
    times.observe(1, 1.0)
    times.forget()
    assert times.seconds(4) == 0.010


def test_without_measured_seconds_more_rows_are_not_taken_to_be_free_until_steps_tell():
    times = SPartForecast()
    assert not times.known
    times.observe(4, 0.010)
    assert times.known
    assert [times.seconds(rows) for rows in (2, 4, 8)] == [0.010, 0.010, 0.020]
    for _ in range(20):
        times.observe(4, 0.010)
        times.observe(8, 0.012)
    assert times.seconds(16) == pytest.approx(0.016)
