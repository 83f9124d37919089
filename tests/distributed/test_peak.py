import jax
import pytest

from tunix_core.distributed.peak import measure_peak_flops


def test_the_best_repetition_counts_for_all_devices() -> None:
    """A scripted clock: repetitions of 4, 2 and 8 ms; one product of width 10 is 2000 operations."""
    moments = iter([0.0, 0.0, 1.0, 1.004, 0.1, 2.0, 2.002, 0.2, 3.0, 3.008, 0.5])
    peak = measure_peak_flops(jax.devices()[:1], width=10, seconds=0.3, monotonic=lambda: next(moments))
    assert peak == pytest.approx(2000 / 0.002)
    assert next(moments, None) is None


def test_at_least_one_repetition_is_timed() -> None:
    assert 1e3 < measure_peak_flops(width=64, seconds=0.0) < 1e16
