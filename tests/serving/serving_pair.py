"""What the serving tests ask of the pair of servers: tokens judged against the standard path, and steps counted."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from generate import Generated, generate

from sgl_lowlatency.cli import openai_client
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import ServerProcess
from sgl_lowlatency.cli.tiny_model import TinyModel
from sgl_lowlatency.runtime.coverage import METRICS_INTERVAL_S

CHUNK = 128  # tokens of one prefill chunk
SETTLE_TIMEOUT_S = 60.0


@dataclass
class Servers:
    """off: SGLang's standard path. on: with the plugin. Both serve the tiny model in `model`."""

    off: ServerProcess
    on: ServerProcess
    model: Path
    oracle: GreedyOracle
    _random: random.Random = field(default_factory=lambda: random.Random(11))

    def prompt(self, length: int) -> list[int]:
        """`length` random token ids, other ones at every call: no prefix is cached by accident."""
        return [self._random.randrange(3, TinyModel.vocab_size) for _ in range(length)]

    def require_right(self, *answers: Generated) -> None:
        """Every token is the standard path's, or one that float64 cannot tell from it: closer than rounding moves logits."""
        for answer in answers:
            standard = generate(self.off.url, answer.prompt_ids, len(answer.output_ids))
            if answer.output_ids == standard.output_ids:
                continue
            wrong = [choice for choice in self.oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right]
            assert not wrong, f"prompt of {len(answer.prompt_ids)} tokens, {len(wrong)} wrong tokens: {wrong[:3]}"

    def steps(self) -> dict[int, int]:
        """Decode steps by rows that the plugin server's kernel has run, once no step is running and the counters rest."""
        known, deadline_s = None, time.monotonic() + SETTLE_TIMEOUT_S
        while (counts := self._steps_now()) != known:
            assert time.monotonic() < deadline_s, f"the counters still move after {SETTLE_TIMEOUT_S:.0f} s: {counts}"
            known = counts
            time.sleep(2.5 * METRICS_INTERVAL_S)
        return counts

    def _steps_now(self) -> dict[int, int]:
        samples = openai_client.metrics(self.on.url, "sgl_lowlatency:decode_steps_total")
        return {int(name.split('rows="')[1].split('"')[0]): int(value) for name, value in samples.items()}

    def rows_served(self) -> int:
        """Tokens that came out of the kernel: the sum of rows over its steps."""
        return sum(rows * count for rows, count in self.steps().items())

    def fallbacks(self) -> dict[str, int]:
        samples = openai_client.metrics(self.on.url, "sgl_lowlatency:fallback_steps_total")
        return {name.split('reason="')[1].split('"')[0]: int(value) for name, value in samples.items()}
