"""Runs pairs of cells: the same sessions on one arm and then on the other, counted by the plugin's own counters, saved together."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmark.agentic import aiperf_driver, arms, cells, direct_driver, records
from benchmark.agentic.aiperf_driver import FIXED
from benchmark.agentic.arms import OFF, ON, Arm
from benchmark.agentic.cells import Cell
from benchmark.agentic.records import Record
from benchmark.agentic.setup import Setup
from benchmark.agentic.work import Work
from benchmark.common import deadline
from benchmark.serve import coverage
from sgl_lowlatency.bench import provenance

SEED = 42
TELL_EVERY_S = 10.0


class Runner:
    """Runs one work's cells on a pair of servers. context: tokens either server takes."""

    def __init__(self, args: argparse.Namespace, work: Work, made: Setup, context: int) -> None:
        self._args, self.work, self._setup, self._context = args, work, made, context
        self._session = uuid.uuid4().hex[:12]
        self._prompts: list[list[direct_driver.Prompt]] = []  # made with the first cell

    def command(self, url: str, repeat: int, concurrency: int, arm: str) -> list[str]:
        """What drives one run: aiperf's command, or what the direct driver is told."""
        args, traces = self._args, self.work.at(concurrency)
        if args.driver == direct_driver.NAME:
            return ["direct", f"--url={url}", f"--concurrency={concurrency}", f"--conversations={len(traces)}"]
        tokenizer, out = self._setup.tokenizer, cells.folder(self.work.out, repeat, concurrency, arm) / "aiperf"
        return aiperf_driver.profile_command(
            args.aiperf_env, url, str(args.model_path or tokenizer), str(tokenizer), self.work.folder(concurrency), out,
            mode=args.mode, concurrency=concurrency, conversations=len(traces), max_context=self._context, duration_s=args.duration, seed=SEED,
        )

    def order(self, repeat: int) -> tuple[str, str]:
        """Which arm runs first in a repeat, and which second."""
        return (OFF, ON) if repeat % 2 else (ON, OFF)

    def pair(self, off: Arm, on: Arm, repeat: int, concurrency: int) -> list[str]:
        """Runs both arms, saves them, and returns which requests were not sent; the report says what else is wrong with a pair. Raises
        ArmsRefused when no step of the on arm ran the plugin."""
        cells.clear(self.work.out, repeat, concurrency)
        before, ended = on.counts(), {}
        done: dict[str, tuple[Cell, list[Record]]] = {}
        for index, name in enumerate(self.order(repeat)):
            done[name] = self._cell(off if name == OFF else on, repeat, concurrency, first=index == 0)
            ended[name] = time.monotonic()
        time.sleep(max(0.0, ended[ON] + coverage.SETTLE_S - time.monotonic()))
        done[ON] = self._counted(done[ON][0], on.counts().since(before)), done[ON][1]
        for cell, found in done.values():
            cells.save(self.work.out, cell, found)
        return [line for cell, found in done.values() for line in self._unsent(cell, found)]

    def half(self, arm: Arm, repeat: int, concurrency: int) -> list[str]:
        """One arm of a pair, of which only the server of this arm stands: runs it, saves it, and returns as `pair`."""
        first = self.order(repeat)[0] == arm.name
        if first:
            cells.clear(self.work.out, repeat, concurrency)
        before = arm.counts() if arm.name == ON else None
        cell, found = self._cell(arm, repeat, concurrency, first=first)
        if before is not None:
            time.sleep(coverage.SETTLE_S)
            cell = self._counted(cell, arm.counts().since(before))
        cells.save(self.work.out, cell, found)
        return self._unsent(cell, found)

    @staticmethod
    def _counted(cell: Cell, gained: coverage.Counts) -> Cell:
        """An on cell with what the plugin counted meanwhile. Raises ArmsRefused when no step ran it."""
        if not gained.rows:
            why = gained.fallbacks or "no fallback counted either"
            raise arms.ArmsRefused(f"plugin not active: no decode step of r{cell.repeat} c{cell.concurrency} on ran it ({why})")
        steps = {str(rows): count for rows, count in sorted(gained.executed.items())}
        return dataclasses.replace(cell, steps=steps, rows=gained.rows, fallbacks=gained.fallbacks)

    def _unsent(self, cell: Cell, found: list[Record]) -> list[str]:
        if self._args.mode != FIXED:
            return []
        lines = records.missing(found, self.work.at(cell.concurrency))
        return [f"{self.work.what} r{cell.repeat} c{cell.concurrency} {cell.arm}: {line}" for line in lines]

    def _cell(self, arm: Arm, repeat: int, concurrency: int, *, first: bool) -> tuple[Cell, list[Record]]:
        """One run, not saved yet, the plugin's counters left out."""
        name = f"{self.work.what} r{repeat} c{concurrency} {arm.name}"
        arm.client.flush()  # and both arms find an empty prefix cache
        place = cells.folder(self.work.out, repeat, concurrency, arm.name)
        place.mkdir(parents=True, exist_ok=True)
        command = self.command(arm.url, repeat, concurrency, arm.name)
        total = sum(len(requests) for trace in self.work.at(concurrency) for _, requests in trace.streams)
        begin, date = time.monotonic(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with _telling(name, total) as progress:
            found = self._drive(arm, concurrency, command, place, progress)
        if not found:
            raise arms.ArmsRefused(f"{name}: no request was answered")
        if arm.process is not None:
            arm.process.require_alive()
        span_s = max(record.start_ms + record.e2e_ms for record in found) / 1e3
        errors = len(records.failures(found))
        deadline.say(f"{name}: {len(found)} requests, {errors} failed, {span_s:.1f} s (with driver {time.monotonic() - begin:.0f} s)")
        machine, told = provenance.gpu(), provenance.sanitized(command)
        return Cell(arm.name, concurrency, repeat, first, self._session, date, round(span_s, 3), machine, command=told), found

    def _drive(self, arm: Arm, concurrency: int, command: list[str], place: Path, progress: Callable[[Record], None]) -> list[Record]:
        if self._args.driver != direct_driver.NAME:
            return aiperf_driver.run(command, place / "aiperf", self._args.run_limit)
        self._prompts = self._prompts or direct_driver.prepare(self.work.traces, self._setup.vocab)
        sessions = self._prompts[: len(self.work.at(concurrency))]
        return direct_driver.run(arm.client, sessions, concurrency=concurrency, progress=progress)


@contextlib.contextmanager
def _telling(name: str, total: int) -> Iterator[Callable[[Record], None]]:
    """Yields a callback for finished requests; says every few seconds how far a run is, also when nothing finishes."""
    ended, lock, begin, seen = threading.Event(), threading.Lock(), time.monotonic(), [0]

    def loop() -> None:
        while not ended.wait(TELL_EVERY_S):
            passed = time.monotonic() - begin
            part = f"{seen[0]}/{total} requests, " if seen[0] else ""
            left = f", about {passed * (total - seen[0]) / seen[0]:.0f} s to go" if seen[0] else ""
            deadline.say(f"{name}: {part}{passed:.0f} s{left}")

    def progress(_record: Record) -> None:
        with lock:
            seen[0] += 1

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()
