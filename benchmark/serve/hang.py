"""A hand-over that never comes must end the server within its deadline, with a record, and leave the GPUs empty.

    SITE_PLANTED first on PYTHONPATH, where the package was built with SGL_LOWLATENCY_PLANTED=3
    python3 -m benchmark.serve.hang --out OUT [--model qwen3-8b] [--layers 8] [--cases request,start]
    python3 -m benchmark.serve.hang --out OUT --name hang-ranks --cases stopped,killed        # two GPUs, any installation

One block of the planted build never hands over tile 0 of layer 0's out_proj. With the self-check on the hang meets the server at start (`start`);
with SGL_LOWLATENCY_SELF_CHECK=0 and no decode graphs it meets a request (`request`). In `stopped` and `killed` rank 1 of two is sent SIGSTOP or
SIGKILL while a request decodes. Exit status 0 if in each case a record was printed in time, the server exited non-zero, and no process and no memory
of it is left on the GPUs. A server whose rank is killed may be ended by SGLang before the kernel's deadline, without a record. On a
CPU ranks are stopped in SGLang's own collectives as often as in a step, and then its watchdog is what ends `stopped`, without a record.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import arguments, server
from benchmark.serve.client import Client, random_prompt
from sgl_lowlatency.bench.results import Results

RECORD = re.compile(r"decode_step stopped: .*waited ([0-9.]+) s for word \d+ of edge '(\w+)' of layer (\d+)")
RECORD_OF_RANK = re.compile(r"decode_step stopped: rank 0, .*waited ([0-9.]+) s for rank 1's part of tile \d+ of (\w+) of layer (\d+)")
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
MEMORY_SLACK_MIB = 64
LONG = 1500  # tokens of a request that is decoding when its rank goes


def ask(client: Client, prompt: list[int], new_tokens: int) -> None:
    """One request that is never answered; a dropped connection or an error answer is what must come."""
    try:
        client.timed([prompt], new_tokens)
    except (OSError, RuntimeError) as error:
        deadline.say("the request ended:", str(error)[:120])


def wait_for(what, limit_s: float):
    """Poll `what` every 0.1 s until it is truthy; its last value."""
    limit = time.monotonic() + limit_s
    while not (value := what()) and time.monotonic() < limit:
        time.sleep(0.1)
    return value


def scheduler_of(session: int, rank: int) -> int:
    """Process id of a server's rank, by the title that SGLang gives its schedulers. Raises RuntimeError where there is none."""
    for entry in Path("/proc").iterdir():
        try:
            is_it = entry.name.isdigit() and os.getsid(int(entry.name)) == session
            if is_it and (entry / "cmdline").read_bytes().startswith(f"sglang::scheduler_TP{rank}".encode()):
                return int(entry.name)
        except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            continue
    raise RuntimeError(f"the server has no process called sglang::scheduler_TP{rank}")


def run(case: str, model: Path, shape, work: Path, args) -> dict:
    """One results row."""
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    command = make(context=2048, max_batch=8, max_tokens=16384) + [
        "--watchdog-timeout",
        str(args.watchdog),
        *args.server_arg,
    ]
    env = {} if case == "start" else {"SGL_LOWLATENCY_SELF_CHECK": "0"}
    if case == "request":
        command += ["--cuda-graph-backend-decode", "disabled", "--skip-server-warmup"]
    record, deadline_s = RECORD, args.watchdog / 2
    if case in SIGNALS:
        command += ["--tp-size", "2"]
        record, deadline_s = RECORD_OF_RANK, args.watchdog / 4
    before_mib = server.gpu_memory_mib()
    one = server.Server(f"hang-{case}", model, [*command, server.FLAG], work=work, env=env)
    problems = []
    asking = None
    if case != "start":
        one.wait_ready(args.start_limit)
        prompt = random_prompt(40, vocab=shape.vocab, seed=1)
        asking = threading.Thread(target=ask, args=(one.client, prompt, LONG if case in SIGNALS else 8), daemon=True)
        began = time.monotonic()
        asking.start()
    if case in SIGNALS:
        time.sleep(args.after)
        if not asking.is_alive():
            problems.append(f"the request had ended after {args.after} s")
        began = time.monotonic()
        os.kill(scheduler_of(one.process.pid, 1), SIGNALS[case])
    elif case == "start":
        wait_for(lambda: one.grep(r"megakernel: active") or one.process.poll() is not None, args.start_limit)
        began = time.monotonic()

    def settled() -> bool:
        return (
            bool(one.grep(record.pattern)) or one.process.poll() is not None or (asking is not None and not asking.is_alive())
        )

    wait_for(settled, deadline_s + (30 if asking else args.start_limit))
    lines = one.grep(record.pattern)
    record_s = time.monotonic() - began
    status = one.wait_exit(args.watchdog + 40) if lines or case == "killed" else one.process.poll()
    exit_s = time.monotonic() - began
    row = {
        "case": case,
        "record": lines[0][-300:] if lines else None,
        "record_s": round(record_s, 1),
        "exit_s": round(exit_s, 1),
        "status": status,
    }
    if not lines:
        problems += [] if case == "killed" else ["no record; end of log: " + one.tail(6)]
    elif args.device == "cuda" and not 1 <= float(record.search(lines[0])[1]) / deadline_s < 1.2:
        problems.append(f"the deadline is {deadline_s:g} s")
    elif case != "start" and record_s > deadline_s + 10:
        problems.append(f"the record came after {record_s:.1f} s, the deadline is {deadline_s:g} s")
    if case == "killed" and exit_s > deadline_s + 10:
        problems.append(f"the server ended after {exit_s:.1f} s, the deadline is {deadline_s:g} s")
    if status is None:
        problems.append("the server did not exit")
    elif status == 0:
        problems.append("exit status 0")
    left = wait_for(lambda: not deadline.group_alive(one.process.pid), 20)
    if not left:
        problems.append("processes of the server are left")
    one.stop(grace_s=1)
    after_mib = server.gpu_memory_mib()
    if before_mib is not None and after_mib > before_mib + MEMORY_SLACK_MIB:
        problems.append(f"GPU memory {before_mib} MiB before, {after_mib} MiB after: {server.gpu_processes()}")
    return row | {"gpu_mib": [before_mib, after_mib], "problems": problems}


def main() -> int:
    parser = arguments.parser(__doc__, deadline_s=300, layers=4)
    parser.add_argument("--name", default="hang", help="results file name")
    parser.add_argument("--cases", default="request,start", help="comma list out of request, start, stopped, killed")
    parser.add_argument("--watchdog", type=float, default=20, help="--watchdog-timeout, s; the kernel's deadline is half of it, between ranks a quarter")
    parser.add_argument("--after", type=float, default=1.5, help="seconds of decoding before rank 1 is stopped or killed")
    args = arguments.parse(parser)
    results = Results(
        args.out,
        what="check",
        name=args.name,
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.serve.hang", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline)
    shape = models.named_shape(args.model, args.layers)
    model = models.write_model(args.work / "model", shape)
    try:
        for case in args.cases.split(","):
            row = results.add(**run(case, model, shape, args.work, args))
            deadline.say(case, "ok" if not row["problems"] else row["problems"])
    finally:
        deadline.kill_all()
    for row in results.content["rows"]:
        print(row)
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
