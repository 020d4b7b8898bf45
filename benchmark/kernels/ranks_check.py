"""What real ranks of decode_step and draft_sampler must show, without a server: launches end, and a rank that is killed stops the others.

    python3 -m benchmark.kernels.ranks_check --out OUT [--ranks 2] [--cases launches,killed,proposals,killed-proposals] [--launches 1000000]

A process a rank, a GPU each, over workspaces that they share. `launches`: graphs of --per-graph launches of a small model of one layer, one after
the other; now and then all ranks' hidden states must have the bits of the first launch. `killed`: the ranks run steps of a model of --layers layers
one after the other; the last one is killed with SIGKILL, whatever it does just then; each other one must leave a record that names it within the
deadline, and end. `proposals` (rank_proposals.py): draft_sampler on DeepSeek-V4.1's sizes. Mixed greedy and sampled requests: all ranks' step
logits, tokens and noise offsets have the same bits, those of one rank that has the whole head; then --proposals of random inputs back to back, all
tokens compared between ranks and now and then with one rank alone; then times of both. `killed-proposals` is `killed` of draft_sampler. Needs torch,
as many GPUs as ranks, and the package; with --device cpu, SGL_LOWLATENCY_EMULATE=1, sizes are small. Exit status 0 if every case passed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.common import deadline
from benchmark.common import ranks as rank_processes
from benchmark.common.ranks import Place
from benchmark.kernels.rank_proposals import Endless, run_proposals
from sgl_lowlatency.bench import timing
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.rank_group import meet
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.fault import DecodeStepFault, DraftSamplerFault, describe_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.sharding import shard_inputs, shard_weights

MODULE = "benchmark.kernels.ranks_check"
WEIGHTS = "random, seed 0"
CASES = ("launches", "killed", "proposals", "killed-proposals")
KILLED = {"killed": "decode_step", "killed-proposals": "draft_sampler"}  # whose record is left
CHECKS = 20  # times that the launches' bits are looked at
MEETING_S = 60.0
STARTED, STOPPED = "launches run", "stopped after"  # what a rank that sees another one killed prints


def geometry_of(num_ranks: int, num_layers: int, is_small: bool) -> Geometry:
    """The whole model's; small: as little as a rank needs."""
    if is_small:
        return Geometry(num_layers, 64, num_ranks, num_ranks, 64, 64 * num_ranks, 64, 512, 1e-6, False)
    return Geometry(num_layers, 512, 2 * num_ranks, 2 * num_ranks, 128, 256 * num_ranks, 512, 512, 1e-6, False)


class Steps:
    """A rank's step over the group's workspaces, one row."""

    def __init__(self, place: Place, num_layers: int, deadline_s: float) -> None:
        self.device, geometry = place.device, geometry_of(place.num_ranks, num_layers, place.device.type == "cpu")
        limits, local = device_limits(place.device), geometry.shard(place.num_ranks)
        plans = {1: make_plan(local, 1, grid_for(local, limits.grid), limits.shared_memory_bytes)}
        weights = shard_weights(geometry, random_weights(geometry, 0, place.device), place.rank, place.num_ranks)
        group = meet(f"{num_layers} layers", geometry.vocab, plans, place.device, place.group, MEETING_S)
        self.step = DecodeStep(local, plans, weights, place.device, deadline_s, group=group)
        self._used = shard_inputs(random_step(geometry, [20], 0, place.device), place.rank, place.num_ranks)
        self.step.attach_kv(self._used.k_buffers, self._used.v_buffers, self._used.req_to_token)
        self.hidden = torch.full((1, geometry.hidden), float("nan"), dtype=torch.bfloat16, device=place.device)

    def launch(self) -> None:
        one = self._used
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        self.step.launch(1, one.input_ids, one.positions, one.seq_lens, one.req_pool_indices, one.out_cache_loc, self.hidden, stream)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fault(self) -> str | None:
        """The record of a launch that ended itself, in words."""
        record = self.step.fault()
        return None if record is None else describe_fault(record)

    def acknowledge_fault(self) -> None:
        self.step.acknowledge_fault()

    def repeated(self, count: int) -> Callable[[], None]:
        """What launches `count` times: on a GPU a graph."""
        def run() -> None:
            for _ in range(count):
                self.launch()

        return timing.capture(run).replay if self.device.type == "cuda" else run

    def digest(self) -> str:
        """Of the hidden states, which are then spoiled."""
        self.synchronize()
        found = hashlib.sha256(self.hidden.cpu().view(torch.int16).numpy().tobytes()).hexdigest()
        self.hidden.fill_(float("nan"))
        return found


def run_launches(place: Place, args: argparse.Namespace) -> dict:
    """The row of `launches`."""
    steps, wrong = Steps(place, 1, args.kernel_deadline), []
    steps.launch()
    first = steps.digest()
    per_graph = min(args.per_graph, args.launches)
    replay, replays, began = steps.repeated(per_graph), args.launches // per_graph, time.monotonic()
    for index in range(replays):
        replay()
        if index % max(replays // CHECKS, 1) == 0 or index + 1 == replays:
            digests = place.gather(steps.digest())
            if digests != [first] * place.num_ranks:
                wrong.append(f"after {(index + 1) * per_graph} launches the ranks have other bits")
                break
    seconds, executed = time.monotonic() - began, place.gather(steps.step.executed())
    if not wrong and executed != [{1: replays * per_graph + 1}] * place.num_ranks:
        wrong.append(f"launches counted: {executed}")
    return {"case": "launches", "tp": place.num_ranks, "launches": replays * per_graph, "seconds": round(seconds, 2), "problems": wrong}


def run_until_stopped(place: Place, args: argparse.Namespace) -> int:
    """A rank that sees another one killed: launches until a peer is missed. Prints STARTED, then the record and how long the last launch took."""
    runner = Steps(place, args.layers, args.kernel_deadline) if args.cases == "killed" else Endless(place, args.kernel_deadline)
    runner.launch()
    runner.synchronize()
    place.barrier()
    print(STARTED, flush=True)
    while True:
        began, record = time.monotonic(), None
        try:
            runner.launch()
            if runner.device.type == "cuda":
                done = torch.cuda.Event()
                done.record()
                while not done.query() and (record := runner.fault()) is None:
                    pass
        except (DecodeStepFault, DraftSamplerFault) as fault:  # in emulation
            record = str(fault)
        except RuntimeError as error:  # the context is gone before the record was seen
            record = runner.fault() or str(error)
        if record is not None:
            print(f"{record}\n{STOPPED} {time.monotonic() - began:.3f} s", flush=True)
            runner.acknowledge_fault()
            return 3


def judge_killed(
    outputs: list[str], statuses: list[int | None], num_ranks: int, deadline_s: float, kernel: str = "decode_step", launch_s: float = 1.0
) -> list[str]:
    """What is wrong with the ranks that were left, by what they printed and how they ended. kernel: whose record it must be. launch_s: what the
    stopped launch may take beside the deadline."""
    dead, wrong = num_ranks - 1, []
    for rank, (text, status) in enumerate(zip(outputs, statuses, strict=True)):
        stopped = re.search(rf"{STOPPED} ([0-9.]+) s", text)
        if stopped is None or not re.search(rf"{kernel} stopped: rank {rank}\b.*\brank {dead}(?:'s | to answer)", text):
            wrong.append(f"rank {rank} left no record that names rank {dead}: {text[-300:]!r}")
        elif not float(stopped[1]) < deadline_s + launch_s:
            wrong.append(f"rank {rank} stopped after {stopped[1]} s, the deadline is {deadline_s:g} s")
        if status is None:
            wrong.append(f"rank {rank} did not end")
        elif status == 0:
            wrong.append(f"rank {rank} ended with status 0")
    return wrong


def kept_lines(text: str, kernel: str) -> list[str]:
    """What a rank's row keeps of its output: the record, without the watching thread's copy of it, and STOPPED."""
    return [line for line in text.splitlines() if re.search(rf"{kernel} stopped|{STOPPED}", line) and "The server cannot go on" not in line]


def kill_one(case: str, args: argparse.Namespace) -> dict:
    """The row of `killed` or `killed-proposals`, by the parent."""
    words, kernel = [*sys.argv[1:], "--cases", case], KILLED[case]
    processes = rank_processes.start(MODULE, words, args.ranks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        heads = []
        for process in processes:  # every rank says so, or ends
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith(STARTED):
                    break
            heads.append("".join(lines))
        if not all(STARTED in head for head in heads):
            return {"case": case, "tp": args.ranks, "problems": [f"the ranks did not start: {heads}"]}
        time.sleep(args.after)
        processes[-1].send_signal(signal.SIGKILL)
        killed, texts, statuses = time.monotonic(), [], []
        for process in processes[:-1]:
            try:
                text, _ = process.communicate(timeout=max(killed + args.kernel_deadline + 30 - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                text = ""
            texts.append(text)
            statuses.append(process.poll())
        kept = ["\n".join(kept_lines(text, kernel)) for text in texts]
        row = {"case": case, "tp": args.ranks, "records": kept, "statuses": statuses, "ended_s": round(time.monotonic() - killed, 2)}
        launch_s = 5.0 if args.device == "cpu" and kernel == "draft_sampler" else 1.0  # which waits all of the deadline; emulation is slow
        return row | {"problems": judge_killed(texts, statuses, args.ranks, args.kernel_deadline, kernel, launch_s)}
    finally:
        deadline.kill_all()


def child(args: argparse.Namespace) -> int:
    place = rank_processes.join(args)
    deadline.watchdog(args.deadline)
    if args.cases in KILLED:
        return run_until_stopped(place, args)
    row = run_launches(place, args) if args.cases == "launches" else run_proposals(place, args)
    if place.rank == 0:
        args.row.write_text(json.dumps(row))
    place.barrier()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rank_processes.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="ranks-check", help="results file name")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma list out of {', '.join(CASES)}")
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--per-graph", type=int, default=500, help="launches of a graph")
    parser.add_argument("--proposals", type=int, default=100_000, help="of random inputs")
    parser.add_argument("--groups", type=int, default=9, help="repeats of the proposals' times")
    parser.add_argument("--group-ms", type=float, default=100, help="of a repeat")
    parser.add_argument("--layers", type=int, default=36, help="of the steps that a rank is killed in")
    parser.add_argument("--after", type=float, default=2.0, help="seconds of steps before the rank is killed")
    parser.add_argument("--kernel-deadline", type=float, default=2.0, help="of every wait in the kernel, s; ranks wait half of it for each other")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=300, help="seconds after which everything is killed")
    parser.add_argument("--row", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return child(args)
    if refusal := rank_processes.missing(args):
        print(f"ranks_check: {refusal}", file=sys.stderr)
        return 2
    results = Results(args.out, what="check", name=args.name, weights=WEIGHTS, command=["python3", "-m", MODULE, *sys.argv[1:]], commit=args.commit)
    results.set(num_gpus=args.ranks if args.device == "cuda" else 0)
    deadline.watchdog(args.deadline)
    for case in args.cases.split(","):
        if case in KILLED:
            row = kill_one(case, args)
        else:
            path = args.out / f"{args.name}.row"
            status = rank_processes.run(MODULE, [*sys.argv[1:], "--cases", case, "--row", str(path)], args.ranks, args.deadline)
            failed = {"case": case, "tp": args.ranks, "problems": [f"the ranks ended with status {status}"]}
            row = json.loads(path.read_text()) if path.exists() else failed
            path.unlink(missing_ok=True)
        results.add(**row)
        deadline.say(case, row["problems"] or "ok", row.get("median_us", ""))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
