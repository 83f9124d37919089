from __future__ import annotations

import numpy as np
import pytest

from tunix_core.errors import DataError
from tunix_core.metrics import MetricRecorder


def test_rows_have_their_time_and_plain_values() -> None:
    moments = iter([1.5, 2.5])
    recorder = MetricRecorder("learner", clock=lambda: next(moments))
    recorder.record(a=1, b=np.float32(0.5), c=np.array(3), d=True, e="text")
    recorder.record()
    assert len(recorder) == 2
    rows = recorder.drain()
    assert rows == [{"time": 1.5, "a": 1, "b": 0.5, "c": 3, "d": True, "e": "text"}, {"time": 2.5}]
    assert [type(value) for value in rows[0].values()] == [float, int, float, int, bool, str]
    assert recorder.drain() == []


def test_rows_that_could_not_be_written_go_back_in_front() -> None:
    recorder = MetricRecorder("learner")
    recorder.record(a=1)
    rows = recorder.drain()
    recorder.record(a=2)
    recorder.restore(rows)
    assert [row["a"] for row in recorder.drain()] == [1, 2]


@pytest.mark.parametrize("value", [None, [1], np.zeros(1), object()])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(DataError, match="metric x: received"):
        MetricRecorder("learner").record(x=value)
