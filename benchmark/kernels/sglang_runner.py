"""SGLang's own model runner in this process, without a server and without plugins: loaded, captured, one decode batch at a time.

The order is that of `sglang.benchmark.one_batch` (SGLang 0.5.23). What is relied on is pinned in tests/contract/test_decode_graphs.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmark import random_weights

PROMPT_SEED = 11


def load(arguments: list[str]) -> Any:
    """A ModelRunner with pools, attention backend and, where `arguments` ask for them, decode graphs. Once a process.

    arguments: a server's, without its port. Directories of models.write_model get their random weights.
    """
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    random_weights.register()
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    ranks = SpawnRanks(world_rank=spawn_world_rank(server_args, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(server_args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    ports, config = PortArgs.init_new(server_args), ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=config)
    fraction = one_batch.resolving_view(server_args).mem_fraction_static
    runner = ModelRunner(
        model_config=config, mem_fraction_static=fraction, gpu_id=0, nccl_port=ports.nccl_port, server_args=server_args
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    if runner.token_to_kv_pool.post_capture_active:
        runner.post_capture_resize_kv_pool()
    return runner


@dataclasses.dataclass
class Step:
    """The first decode step behind `prompts`, run once. token: [rows] its input ids. logits: [rows, vocab]. batch: SGLang's
    ForwardBatch, of `scheduled`, its ScheduleBatch. in_graph: whether a captured graph ran it. history: of engram_history in front of the step, None where
    the model has none."""

    prompts: list[list[int]]
    token: torch.Tensor
    logits: torch.Tensor
    batch: Any
    scheduled: Any
    in_graph: bool
    history: torch.Tensor | None = None


Within = Callable[[Any], contextlib.AbstractContextManager]  # of the ForwardBatch that is about to run


def decode(runner: Any, *, rows: int, context: int, vocab: int, within: Within | None = None) -> Step:
    """Prefills `rows` random prompts and runs the decode step at which each has `context` tokens with the new one.

    Everything cached before is dropped. Replaying the step's graph again computes and writes the same once more, but for a model with Engram layers,
    whose history takes the token in once more (`again` puts it back). within: entered for the decode step alone.
    """
    from sglang.benchmark import one_batch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    generator = torch.Generator().manual_seed(PROMPT_SEED + 1000 * rows + context)
    prompts = torch.randint(10, vocab, (rows, context - 1), generator=generator).tolist()
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(rows, context - 1, prompts)
    token, _, scheduled = one_batch.extend(requests, runner)
    with torch.no_grad():
        scheduled.input_ids = token.to(torch.int64)
        scheduled.prepare_for_decode()
    history = engram_history(runner)
    before = None if history is None else history.clone()
    return dataclasses.replace(_forward(runner, prompts, scheduled, within), history=before)


def again(runner: Any, step: Step, within: Within | None = None) -> Step:
    """`step` once more: of the same tokens and slots, behind the same prefill. A second prefill would not do to compare two ways to run a step: that of
    random weights does not always choose the same token. The tokens that Engram layers hash, which every decode step moves on, are those in front of
    `step` again."""
    if step.history is not None:
        engram_history(runner).copy_(step.history)
    return dataclasses.replace(_forward(runner, step.prompts, step.scheduled, within), history=step.history)


def engram_history(runner: Any) -> torch.Tensor | None:
    """The last tokens of every request slot, which DeepSeek-V4.1's Engram layers hash, as SGLang keeps them; None for a model without."""
    hasher = getattr(getattr(runner.model, "model", None), "engram_hasher", None)
    return None if hasher is None else hasher.history


@torch.no_grad()
def _forward(runner: Any, prompts: list[list[int]], scheduled: Any, within: Within | None) -> Step:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    batch = ForwardBatch.init_new(scheduled, runner, return_hidden_states_before_norm=False)
    with contextlib.nullcontext() if within is None else within(batch):
        output = runner.forward(batch)
    logits = output.logits_output.next_token_logits
    return Step(prompts, scheduled.input_ids.clone(), logits.clone(), batch, scheduled, bool(output.can_run_graph))


@contextlib.contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """SGLang's decode steps run launch by launch, as its runner does where nothing was captured."""
    own, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    try:
        yield
    finally:
        runner.decode_cuda_graph_runner = own


@dataclasses.dataclass
class Graphs:
    """Captured decode graphs by SGLang's key, with their outputs."""

    graphs: dict
    outputs: dict


def captured(runner: Any) -> Graphs:
    """The decode graphs that SGLang captured at its start."""
    backend = runner.decode_cuda_graph_runner.backend
    return Graphs(dict(backend._graphs), dict(backend._outputs))


def capture_without_head(runner: Any) -> Graphs:
    """The same graphs captured once more by SGLang, of the model up to its final norm; SGLang keeps its own. Call before any batch.

    Both read the same static inputs and attention metadata: what `forward` loads for one is loaded for the other.
    """
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    decode_runner = runner.decode_cuda_graph_runner
    own, backend = captured(runner), decode_runner.backend
    try:
        with forward_without_head(runner.model), model_capture_mode():
            decode_runner.capture()
        return captured(runner)
    finally:
        backend._graphs, backend._outputs = own.graphs, own.outputs


@contextlib.contextmanager
def forward_without_head(model: torch.nn.Module) -> Iterator[None]:
    """model.forward gives the hidden states behind the final norm instead of logits."""

    @torch.no_grad()
    def forward(input_ids, positions, forward_batch, **eager):  # eager runs name a pipeline's tensors, None here
        return model.model(input_ids, positions, forward_batch, **eager)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
