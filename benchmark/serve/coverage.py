"""What the plugin says it ran: its Prometheus counters and its lines in the server's log."""

from __future__ import annotations

import dataclasses
import re
import time

from benchmark.serve.server import Server
from sgl_lowlatency.runtime.coverage import EXPECTED

STEPS = re.compile(r'^sgl_lowlatency:decode_steps_total\{.*?rows="(\d+)"')
MODE = re.compile(r'mode="(\w+)"')
FALLBACKS = re.compile(r'^sgl_lowlatency:fallback_steps_total\{.*?reason="([^"]*)"')
SETTLE_S = 2.5  # the counters are exported every two seconds


@dataclasses.dataclass(frozen=True)
class Counts:
    """executed: our steps by rows. fallbacks: SGLang's own eager forwards by reason. seen: the plugin exports at all. modes: what
    the steps were, "decode" or "verify"."""

    executed: dict[int, float]
    fallbacks: dict[str, float]
    seen: bool
    modes: frozenset[str] = frozenset()

    @property
    def rows(self) -> float:
        """Executed steps times their rows, padded rows of a graph included."""
        return sum(rows * count for rows, count in self.executed.items())

    def since(self, before: Counts) -> Counts:
        """The counts gained after `before`."""
        gained = _gained(self.executed, before.executed), _gained(self.fallbacks, before.fallbacks)
        return Counts(*gained, self.seen, self.modes)

    def summary(self) -> dict:
        """JSON fields of a results row."""
        return {
            "steps": {str(k): v for k, v in sorted(self.executed.items())},
            "rows": self.rows,
            "fallbacks": self.fallbacks,
        }

    def problems(self, needed_rows: int) -> list[str]:
        """Why these counts cannot be those of a run that needed `needed_rows` decode rows and lost no step."""
        if not self.seen:
            return ["the server exports no sgl_lowlatency counters"]
        problems = [f"fallback of {n:.0f} steps: {why}" for why, n in self.fallbacks.items() if why not in EXPECTED and n]
        if self.rows < needed_rows:
            problems.append(f"{self.rows:.0f} decode rows executed, {needed_rows} needed")
        return problems


def _gained(after: dict, before: dict) -> dict:
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def parse(samples: dict[str, float]) -> Counts:
    """The plugin's counters among Prometheus samples."""
    executed: dict[int, float] = {}
    fallbacks: dict[str, float] = {}
    modes = set()
    for key, value in samples.items():
        if found := STEPS.match(key):
            executed[int(found[1])] = executed.get(int(found[1]), 0) + value
            modes.update(MODE.findall(key))
        elif found := FALLBACKS.match(key):
            fallbacks[found[1]] = fallbacks.get(found[1], 0) + value
    return Counts(executed, fallbacks, any(key.startswith("sgl_lowlatency") for key in samples), frozenset(modes))


def read(server: Server) -> Counts:
    """The counters of an idle server, once they have settled."""
    time.sleep(SETTLE_S)
    return parse(server.metrics())


def exit_lines(server: Server) -> list[str]:
    """The plugin's last coverage lines in the log."""
    return [line[:400] for line in server.grep(r"sgl-lowlatency coverage:")[-3:]]


def uncovered_graphs(server: Server) -> list[str]:
    """A problem if SGLang captured decode graphs that do not run the plugin, or said nothing about them."""
    lines = server.grep(r"runs the decode graphs of batch sizes")
    found = re.search(r"\((\d+) of (\d+)\)", lines[-1]) if lines else None
    if found is None:
        return ["SGLang logged no decode graphs that run the plugin"]
    return [] if found[1] == found[2] else [f"the plugin runs {found[1]} of {found[2]} captured decode graphs"]
