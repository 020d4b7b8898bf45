"""What is replayed: the sessions of one shape, or of the operator's own traces, and which of them at which concurrency."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.traces import schema, synthesize
from benchmark.traces.schema import Trace, TraceError
from benchmark.traces.shapes import EVERY, FIXED_LENGTHS


@dataclass(frozen=True)
class Work:
    """out: folder of its runs and its report. what: kind of results file. shape: where the sessions are from, in words. per_lane: None, or
    sessions a lane: then a concurrency replays that many times itself of the sessions, the first ones."""

    out: Path
    what: str
    shape: str
    traces: Sequence[Trace]
    per_lane: int | None

    def at(self, concurrency: int) -> Sequence[Trace]:
        """The sessions replayed at this concurrency."""
        return self.traces if self.per_lane is None else self.traces[: concurrency * self.per_lane]

    def folder(self, concurrency: int) -> Path:
        """A folder of just their files."""
        if self.per_lane is None:
            return self.out / "traces" / "replayed"
        place = self.out / "traces" / f"c{concurrency}"
        _copy(self.at(concurrency), place)
        return place

    @property
    def peak_tokens(self) -> int:
        """Tokens of the longest request, its output included."""
        return max(trace.peak_tokens for trace in self.traces)


def of(args: argparse.Namespace) -> list[Work]:
    """The work that `args` asks for, written below OUT. Raises TraceError where a session or the number of them does not do."""
    found = [_one(args, args.out, args.shape)]
    return found + ([_one(args, args.out / args.beside, args.beside)] if args.beside else [])


def _one(args: argparse.Namespace, out: Path, shape: str) -> Work:
    own = args.traces is not None and out == args.out
    if own:
        made, words = schema.read(args.traces), f"from {args.traces.name}"
    else:
        shutil.rmtree(out / "traces" / "all", ignore_errors=True)
        sizes = {"seed": args.seed}
        if shape not in FIXED_LENGTHS:
            sizes |= {"scale": args.scale, "turns": args.turns}
        elif args.smoke:
            sizes |= {"scale": args.scale}  # the tiny model takes no others
        made = synthesize.write(out / "traces" / "all", EVERY[shape], sessions=args.sessions, **sizes)
        words = ", ".join([shape, *(f"{name} {value:g}" for name, value in sizes.items() if value is not None)])
    chosen = [trace for trace in made if args.peak is None or trace.peak_tokens <= args.peak][: args.sessions]
    if not chosen:
        raise TraceError(f"no session has a peak of {args.peak} tokens or less; the shortest has {min(t.peak_tokens for t in made)}")
    if args.per_lane is not None and len(chosen) < args.per_lane * max(args.concurrency):
        lanes = f"{max(args.concurrency)} lanes of {args.per_lane} sessions"
        raise TraceError(f"{len(chosen)} sessions are too few for {lanes}: replay fewer at once, more traces, or raise --peak")
    _copy(chosen, out / "traces" / "replayed")
    what = "fixed-length" if not own and shape in FIXED_LENGTHS else "replay"
    return Work(out, what, words, schema.read(out / "traces" / "replayed"), args.per_lane)


def _copy(traces: Sequence[Trace], place: Path) -> None:
    """Makes `place` a folder of these traces' files and no others."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for trace in traces:
        shutil.copy(trace.path, place / trace.path.name)
