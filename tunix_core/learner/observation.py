"""Everything the learner tells about itself: metrics rows, sinks, traces, step times, utilisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.data.ledger import Ledger
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.distributed.peak import measure_peak_flops
from tunix_core.learner.batches import HostBatch
from tunix_core.learner.gap_watch import GapWatch
from tunix_core.learner.profiling import StepProfiler
from tunix_core.learner.reporting import batch_flops, step_row
from tunix_core.learner.step_time import StepTimer, StepTimes
from tunix_core.learner.totals import BusyMeter
from tunix_core.metrics import MetricRecorder
from tunix_core.sinks.opening import open_sinks
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.store import ObjectStore

_SHOWN = ("reward_mean", "success_rate", "staleness_mean", "staleness_max", "loss", "num_windows")
"""Figures of the last step that the heartbeat repeats."""


class Observer:
    """One per life of the learner. `profiler.poll` belongs to the pulse thread, the rest to the one that steps."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        ledger: Callable[[], Ledger],
        *,
        process: str,
        incarnation: str,
        log: Callable[[str], None],
        is_first: bool = True,
    ) -> None:
        """
        Args:
            ledger: of the whole run.
            is_first: of several hosts host 0, whose rows are those of the whole batch; the others write none.

        Raises:
            ConfigError: the package of a configured sink is not installed.
        """
        if not is_first:
            config = dataclasses.replace(config, observability=dataclasses.replace(config.observability, sinks=()))
        self._config = config
        self._ledger_now = ledger
        self._is_first = is_first
        self._recorder = MetricRecorder(process)
        self._sinks = open_sinks(store, config, process=process, incarnation=incarnation, log=log)
        self._log = log
        self._compilations = CompilationCounter()
        self._peak_flops = config.observability.peak_flops_per_second
        self._last_row: Mapping[str, Any] = {}
        self._last_times = StepTimes()
        self._files = MetricFiles(store, self._recorder, incarnation=incarnation)
        self._gaps = GapWatch(config.observability.max_logprob_gap, log)
        self.profiler = StepProfiler(store, incarnation=incarnation, log=log)
        self.timer = StepTimer()

    def warmed_up(self) -> None:
        """Everything is compiled: measures the devices' peak where none is configured; from here on nothing compiles."""
        if not self._peak_flops:
            self._peak_flops = measure_peak_flops()
            self._log(f"peak of float32 products: {self._peak_flops:.3g} FLOP/s")
        self._compilations.warmed_up()

    def record(
        self, host: HostBatch, values: Mapping[str, float], busy: BusyMeter, *, clock: int, **columns: Any
    ) -> None:
        """The row of a step, first-use or executed again: into the metrics and to the sinks."""
        row = step_row(
            host,
            self._gaps.look(host, values),
            clock=clock,
            bound=self._config.staleness.max_staleness,
        )
        row |= batch_flops(host, self._config.model) | columns | self._ledger() | self._rates(busy)
        self._last_row = row
        if self._is_first:
            self._recorder.record(**row)  # kept until it is flushed, which the others never do
        self._sinks.write(clock, row)

    def step_times(self) -> StepTimes:
        """Of the step that ends here."""
        self._last_times = self.timer.finish()
        return self._last_times

    def flush(self) -> None:
        """Bring the metrics files up to date."""
        if self._is_first:
            self._files.flush()

    def record_end(self, clock: int) -> None:
        """A last row: what the ledger says when nothing moves any more."""
        self._recorder.record(clock=clock, final=1, **self._ledger())

    def figures(self, busy: BusyMeter) -> dict[str, Any]:
        """What the heartbeat shows of all this."""
        return {
            **{name: self._last_row[name] for name in _SHOWN if name in self._last_row},
            **self._rates(busy),
            **self._gaps.figures(),
            "step_times": self._last_times.columns(),
            "profile": self.profiler.current,
            "num_profile_failures": self.profiler.num_failures,
            "num_dropped_sinks": self._sinks.num_dropped_sinks,
            "num_dropped_sink_rows": self._sinks.num_dropped_rows,
        }

    def close(self) -> None:
        """Finish the trace in hand and bring the sinks up to date; both in bounded time."""
        self.profiler.close()
        self._sinks.close()

    def _rates(self, busy: BusyMeter) -> dict[str, Any]:
        """Since the first step of each life, waits included."""
        return {
            "learner_busy_fraction": busy.fraction,
            "tokens_per_second": busy.tokens_per_second,
            "model_flops_utilization": busy.flops_per_second / self._peak_flops if self._peak_flops else 0.0,
            "peak_flops_per_second": self._peak_flops,
            "compilations_after_warmup": self._compilations.after_warmup,
        }

    def _ledger(self) -> dict[str, int]:
        return {f"ledger_{name}": tokens for name, tokens in self._ledger_now().tokens().items()}
