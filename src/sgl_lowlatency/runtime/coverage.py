"""How many steps our kernel ran, and why the others ran SGLang's forward.

Executed steps are counted on the device, because the replay of a CUDA graph calls no Python. Fallbacks are counted in
`plan`, which runs for every eager forward. What neither sees is the replay of a standard decode graph: a captured batch size
that `plan` declined. SGLang names those sizes once, at the end of the capture.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import multiprocessing.util
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

PREFILL = "prefill"
DRAFT_MODEL = "a draft model's step"
EXPECTED = (PREFILL, DRAFT_MODEL)  # reasons that no setting changes
DECODE, VERIFY = "decode", "verify"  # what a server's steps are; they never mix
WARN_AFTER_FALLBACKS = 16  # decode steps in a row without one of ours: the server has no coverage
METRICS_INTERVAL_S = 1.0


@dataclass(frozen=True)
class CoverageCounts:
    """executed: our steps by rows, self-check and warm-up left out. fallbacks: SGLang's eager forwards by reason. mode: DECODE
    or VERIFY, of the executed steps. kernel: that ran them."""

    executed: dict[int, int]
    fallbacks: dict[str, int]
    mode: str = DECODE
    kernel: str = "decode_step"

    def __str__(self) -> str:
        rows = ", ".join(f"{rows} rows: {count}" for rows, count in sorted(self.executed.items()) if count)
        ours = sum(self.executed.values())
        text = f"{self.kernel} ran {ours} {self.mode} steps" + (f" ({rows})" if rows else "")
        why = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.fallbacks.items()))
        return f"{text}; SGLang's forward ran {sum(self.fallbacks.values())} eager steps" + (f" ({why})" if why else "")


class Coverage:
    """Counts of one model. `executed` reads the device's counters: completed launches by rows, all of them. mode: as in
    CoverageCounts, as kernel is. of: words for the log that say which model, if it is not the served one."""

    def __init__(self, executed: Callable[[], dict[int, int]], mode: str = DECODE, of: str = "", kernel: str = "decode_step"):
        self._executed, self._mode, self._of, self._kernel = executed, mode, of, kernel
        self._discounted: collections.Counter[int] = collections.Counter()
        self._fallbacks: collections.Counter[str] = collections.Counter()
        self._settling = threading.RLock()  # held while launches run that are about to be left out
        self._unserved = 0
        self._warned = False
        self._logged: CoverageCounts | None = None

    def counts(self) -> CoverageCounts:
        with self._settling:
            executed = {rows: max(0, n - self._discounted[rows]) for rows, n in self._executed().items()}
        return CoverageCounts(executed=executed, fallbacks=dict(self._fallbacks), mode=self._mode, kernel=self._kernel)

    @contextlib.contextmanager
    def uncounted(self, rows: int) -> Iterator[None]:
        """Leaves the launches of `rows` rows that the body runs, and waits for, out of the counts: they serve nobody.

        Readers on other threads wait for the body's end, so that none sees such a launch as a served step.
        """
        with self._settling:
            before = self._executed().get(rows, 0)
            try:
                yield
            finally:
                self._discounted[rows] += self._executed().get(rows, 0) - before

    def discount(self, rows: int, num_steps: int) -> None:
        """Leaves `num_steps` launches of `rows` rows that follow out of the counts: they serve nobody."""
        self._discounted[rows] += num_steps

    def count_fallback(self, reason: str) -> None:
        """One forward that runs SGLang's own code; the first WARN_AFTER_FALLBACKS steps of ours among them are worth a warning."""
        self._fallbacks[reason] += 1
        if reason in EXPECTED or self._warned:
            return
        self._unserved += 1
        if self._unserved < WARN_AFTER_FALLBACKS:
            return
        self._warned = True
        if sum(self.counts().executed.values()) == 0:
            why = "; ".join(f"{reason}: {n}" for reason, n in self._fallbacks.most_common() if reason not in EXPECTED)
            logger.warning(
                "sgl-lowlatency: none of the first %d %s steps ran %s (%s)", self._unserved, self._mode, self._kernel, why
            )

    def log(self) -> None:
        """Logs the counts unless they are the ones logged last."""
        counts = self.counts()
        if counts != self._logged:
            self._logged = counts
            logger.info("sgl-lowlatency coverage%s: %s", self._of, counts)

    def start_reporting(self, interval_s: float, with_metrics: bool) -> None:
        """A line at exit, one on SIGUSR1, one every `interval_s` seconds (0: none), and Prometheus counters on request."""
        multiprocessing.util.Finalize(None, self.log, exitpriority=10)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, lambda _signum, _frame: self.log())
        if interval_s > 0:
            _every(interval_s, self.log, "sgl-lowlatency-coverage")
        if with_metrics:
            metrics = CoverageMetrics()
            _every(METRICS_INTERVAL_S, lambda: metrics.update(self.counts()), "sgl-lowlatency-metrics")


@functools.cache
def _counters(registry: Any) -> tuple[Any, Any]:
    """The process's counters of steps and of fallbacks: a target and its draft model count into the same ones."""
    # imported here: prometheus_client reads PROMETHEUS_MULTIPROC_DIR, which SGLang sets, at import
    import prometheus_client

    extra = {} if registry is None else {"registry": registry}
    return (
        prometheus_client.Counter(
            "sgl_lowlatency:decode_steps", "Decode and verify steps run by the plugin's kernels.", ["mode", "rows"], **extra
        ),
        prometheus_client.Counter(
            "sgl_lowlatency:fallback_steps", "Eager steps run by SGLang's own forward.", ["reason"], **extra
        ),
    )


class CoverageMetrics:
    """Prometheus counters beside SGLang's; multi-process safe, because prometheus_client sums counters over processes."""

    def __init__(self, registry: Any = None):
        self._steps, self._fallbacks = _counters(registry)
        self._published: collections.Counter[tuple[str, str]] = collections.Counter()

    def update(self, counts: CoverageCounts) -> None:
        """Raises the counters to `counts`. A count that is lower for a moment, while a discounted launch is still to come,
        changes nothing."""
        for rows, count in counts.executed.items():
            self._raise_to("rows", str(rows), self._steps.labels(mode=counts.mode, rows=str(rows)), count)
        for reason, count in counts.fallbacks.items():
            self._raise_to("reason", reason, self._fallbacks.labels(reason=reason), count)

    def _raise_to(self, label: str, value: str, counter: Any, count: int) -> None:
        gained = count - self._published[label, value]
        if gained > 0:
            counter.inc(gained)
            self._published[label, value] = count


def _every(interval_s: float, action: Callable[[], None], name: str) -> None:
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(interval_s):
            action()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    # before the interpreter takes logging and the counters' memory apart
    multiprocessing.util.Finalize(None, stop.set, exitpriority=20)
