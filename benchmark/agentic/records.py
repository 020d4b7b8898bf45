"""What a driver reports of one request, kept one JSON object a line; and the proof that two runs did the same work."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmark.traces.schema import Trace


@dataclasses.dataclass(frozen=True)
class Record:
    """conversation, stream, turn: which request of which trace. start_ms: since the run began. input_tokens, output_tokens: as the server
    counted them. prompt_sha, output_sha: SHA-256 of what was sent and of what came back. ttft_ms, e2e_ms: until the first token and the
    last. gaps_ms: a gap for every output token but the first ones that came together; tokens that arrive in one event share its gap evenly.
    cached_tokens: of the prompt, found in the prefix cache; None where the driver cannot tell. verify_steps: of speculative decoding.
    error: None, or what went wrong; then the other figures mean nothing.
    """

    conversation: str
    stream: str
    turn: int
    start_ms: float
    input_tokens: int
    output_tokens: int
    prompt_sha: str
    output_sha: str
    ttft_ms: float
    e2e_ms: float
    gaps_ms: tuple[float, ...]
    cached_tokens: int | None = None
    verify_steps: int | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.conversation, self.stream, self.turn

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds an output token after the first, None for outputs of one token."""
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def gaps(arrivals: Iterable[tuple[float, int]]) -> tuple[float, ...]:
    """Gaps between output tokens, from (milliseconds, tokens so far) of every event in order."""
    found: list[float] = []
    before: tuple[float, int] | None = None
    for at_ms, total in arrivals:
        if before is not None and total > before[1]:
            count = total - before[1]
            found += [(at_ms - before[0]) / count] * count
        if before is None or total > before[1]:
            before = (at_ms, total)
    return tuple(round(gap, 4) for gap in found)


def digest(value: object) -> str:
    """SHA-256 of a string, or of a JSON value in one canonical writing."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, records: list[Record]) -> None:
    """One line a record; a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records))
    os.replace(partial, path)


def read(path: Path) -> list[Record]:
    """Raises ValueError, with the line, on a record of another version of this file."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            value = json.loads(line)
            found.append(Record(**value | {"gaps_ms": tuple(value["gaps_ms"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    return found


def work(records: list[Record]) -> dict:
    """What was asked for: {requests, input_tokens, output_tokens, prompts_sha, lengths_sha}, hashes over all requests in the order of
    conversation, stream and turn."""
    ordered = sorted(records, key=lambda record: record.key)
    return {
        "requests": len(ordered),
        "input_tokens": sum(record.input_tokens for record in ordered),
        "output_tokens": sum(record.output_tokens for record in ordered),
        "prompts_sha": digest([[*record.key, record.prompt_sha] for record in ordered]),
        "lengths_sha": digest([[*record.key, record.input_tokens, record.output_tokens] for record in ordered]),
    }


def failures(records: list[Record]) -> list[str]:
    """Requests without an answer."""
    return [f"{'/'.join(map(str, record.key))}: {record.error}" for record in records if record.error is not None]


def missing(found: list[Record], traces: Sequence[Trace]) -> list[str]:
    """Sessions of which a fixed-work run did not send every request. (aiperf cuts a session where its prefix is dropped and runs the rest as
    a stream of its own, so requests are counted by session.)"""
    sent = collections.Counter(record.conversation for record in found)
    wanted = {trace.id: sum(len(requests) for _, requests in trace.streams) for trace in traces}
    return [f"{name}: {sent[name]} of {number} requests sent" for name, number in wanted.items() if sent[name] != number]


def unequal(off: list[Record], on: list[Record]) -> list[str]:
    """Why the two arms did not do the same work; empty when every request was sent byte for byte and answered at the same length."""
    left, right = {r.key: r for r in off}, {r.key: r for r in on}
    problems = [f"{'/'.join(map(str, key))}: sent to one arm only" for key in sorted(left.keys() ^ right.keys())]
    if len(left) != len(off) or len(right) != len(on):
        problems.append("a request was sent twice")
    for key in sorted(left.keys() & right.keys()):
        name, a, b = "/".join(map(str, key)), left[key], right[key]
        if a.prompt_sha != b.prompt_sha:
            problems.append(f"{name}: other prompts")
        elif (a.input_tokens, a.output_tokens) != (b.input_tokens, b.output_tokens):
            problems.append(f"{name}: {a.input_tokens} + {a.output_tokens} tokens off, {b.input_tokens} + {b.output_tokens} on")
    return problems


def same_answers(left: list[Record], right: list[Record]) -> float | None:
    """Share of requests whose whole answers are equal; None without a request in both."""
    others = {record.key: record.output_sha for record in right if record.error is None}
    pairs = [(record.output_sha, others[record.key]) for record in left if record.error is None and record.key in others]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None
