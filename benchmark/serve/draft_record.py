"""What a DSPARK server drafts, block by block, as its own worker saw it: a hook for SGLang, the same with the plugin and without.

`register` is an entry point of the group `sglang.srt.plugins`, which `install` puts on a server's path. It wraps two calls of SGLang's and changes
neither their arguments nor what they return:

- DraftBlockProposer.propose, whose proposal is eager or the output of the draft's graph. Of requests named by `run_name`, and of no others, the
  anchors, the draft tokens and the best two step logits are copied behind the step on its own stream; a thread writes them once they are there.
- DSparkWorkerV2.forward_batch_generation: the prefill that a named run begins with finds torch's generators seeded with the run's seed, and the noise
  of drafts at its beginning. SGLang ignores a request's sampling_seed there: acceptance draws from torch's generator, drafts from the server's noise.

A server whose requests have other names does nothing more than compare strings: what is timed is not recorded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark.common import sglang_hook

NAME = "benchmark_draft_record"
PREFIX = "recorded"
FILE = "BENCHMARK_DRAFT_RECORD"  # environment: where a server writes its blocks
POLL_S = 0.02
PLUGIN, SGLANG = "draft_sampler", "sglang"
_PROPOSE = "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose"
_FORWARD = "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.forward_batch_generation"


@dataclasses.dataclass(frozen=True)
class Block:
    """One request's drafts of one step. step: of the server's recorded ones. row: of the batch, which has `batch` requests. prefix: tokens of the
    request before the anchor. best: of every draft the two best step logits, None where none are kept. made_by: PLUGIN or SGLANG."""

    step: int
    row: int
    batch: int
    prefix: int
    anchor: int
    drafts: tuple[int, ...]
    best: tuple[tuple[float, float], ...] | None
    made_by: str


def run_name(run: str, seed: int) -> str:
    """What the names of a run's requests begin with; `request_names` ends them."""
    return f"{PREFIX}.{seed}.{run}"


def request_names(name: str, count: int) -> list[str]:
    return [f"{name}.{index}" for index in range(count)]


def install(folder: Path) -> str:
    """Installs `register` in `folder`; returns what a server's PYTHONPATH needs."""
    return sglang_hook.install(folder, NAME, "benchmark.serve.draft_record:register")


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(Path(os.environ[FILE]))
    HookRegistry.register(_PROPOSE, recorder.around_propose, HookType.AROUND)
    HookRegistry.register(_FORWARD, recorder.around_forward, HookType.AROUND)


class Recorder:
    """Of one server process. path: where its blocks go, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path, self._steps, self._run = path, 0, ""
        self._waiting: queue.Queue = queue.Queue()
        self._thread: threading.Thread | None = None

    def around_forward(self, original, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Seeds the prefill that a named run begins with."""
        if batch.forward_mode.is_extend() and batch.reqs and batch.reqs[0].rid.startswith(PREFIX):
            run = batch.reqs[0].rid.rpartition(".")[0]
            if run != self._run:
                self._run = run
                _seed(worker, int(run.split(".")[1]))
        return original(worker, batch, *args, **kwargs)

    def around_propose(self, original, proposer: Any, **kwargs: Any) -> Any:
        """Copies a named run's proposal."""
        proposal = original(proposer, **kwargs)
        batch = kwargs["batch"]
        names = [request.rid for request in batch.reqs]
        if any(name.startswith(PREFIX) for name in names):
            self._add(names, batch.seq_lens, proposal, _made_by(proposer, proposal, len(names)))
        return proposal

    def _add(self, names: list[str], prefixes: Any, proposal: Any, made_by: str) -> None:
        import torch

        block = proposal.draft_block
        with torch.no_grad():
            drafts = block.draft_tokens
            ids = torch.cat((prefixes.long()[:, None], proposal.draft_block_ids[:, :1].long(), drafts.long()), dim=1)
            logits = block.corrected_logits
            copies = [_copy(ids), None if logits is None else _copy(logits.float().topk(2, dim=-1).values)]
            event = None
            if ids.is_cuda:
                event = torch.cuda.Event()
                event.record()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name=NAME, daemon=True)
            self._thread.start()
        self._waiting.put((self._steps, names, copies, made_by, event))
        self._steps += 1

    def _write_all(self) -> None:
        while True:
            step, names, (ids, best), made_by, event = self._waiting.get()
            while event is not None and not event.query():
                time.sleep(POLL_S)
            with self._path.open("a") as out:
                for row, (name, (prefix, anchor, *drafts)) in enumerate(zip(names, ids.tolist(), strict=True)):
                    block = Block(step, row, len(names), prefix, anchor, drafts, None if best is None else best[row].tolist(), made_by)
                    out.write(json.dumps({"request": name, **dataclasses.asdict(block)}) + "\n")


def _copy(tensor: Any) -> Any:
    """On the host, once the stream has come so far."""
    import torch

    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _made_by(proposer: Any, proposal: Any, requests: int) -> str:
    """Whose launch the proposal is: that which the draft's graph of so many requests captured."""
    steps = getattr(proposer._draft_sampler, "_megakernel_steps", None)
    if not proposal.folded or steps is None:
        return SGLANG
    sizes = proposer.draft_model_runner.decode_cuda_graph_runner.capture_bs
    return SGLANG if steps(min(size for size in sizes if size >= requests)) is None else PLUGIN


def _seed(worker: Any, seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    worker._proposer.noise.offset.zero_()


def blocks(path: Path) -> dict[str, list[Block]]:
    """By request, in the order of steps; {} where nothing was recorded. A line that is still being written is left out."""
    found: dict[str, list[Block]] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith("\n"):
            continue
        fields = json.loads(line)
        fields["drafts"] = tuple(fields["drafts"])
        fields["best"] = None if fields["best"] is None else tuple(map(tuple, fields["best"]))
        found.setdefault(fields.pop("request"), []).append(Block(**fields))
    return found


def wait_blocks(path: Path, names: Iterable[str], steps: Iterable[int], limit_s: float = 20.0) -> list[list[Block]]:
    """Of each request its first `steps` blocks: a server may draft once more for a request that has ended. Raises RuntimeError naming a request whose
    blocks do not come."""
    wanted, end_s = dict(zip(names, steps, strict=True)), time.monotonic() + limit_s
    while missing := {name: count for name, count in wanted.items() if len(blocks(path).get(name, ())) < count}:
        if time.monotonic() > end_s:
            name, count = next(iter(missing.items()))
            raise RuntimeError(f"{len(blocks(path).get(name, ()))} of {count} draft blocks of request {name} were recorded in {path.name}")
        time.sleep(0.1)
    found = blocks(path)
    return [found[name][:count] for name, count in wanted.items()]
