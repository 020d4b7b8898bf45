"""k1 and k2 on the GPU: the numerics gate against the float64 oracle, real widths of layers, decode and verify, graph replay, bits that repeat.

On an AMD GPU the code objects; on an NVIDIA GPU the same stages in waves of two warps. The oracle runs on the CPU.
Ranks: several on one GPU, and where there are two GPUs on both.
"""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from monokernel_cases import gate, moe_gate, tiny, tiny_moe
from monokernel_gpu import RanksInOneProcess, layer_to, on_this_gpu, step_inputs

from sgl_lowlatency.kernels.monokernel import Monokernels
from sgl_lowlatency.reference import dense_decode
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.step import StepOutputs, read_kv_rows

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
QWEN3_0_6B, QWEN3_8B = tiny(3, 1024, 16, 8, 128, 3072), tiny(2, 4096, 32, 8, 128, 12288)
QWEN3_30B_A3B = tiny_moe(2, 2048, 32, 4, 128, 128, 8, 768)
STEPS = {
    "1": ([1000], {}), "2": ([65, 1], {}), "6": ([1, 63, 64, 65, 130, 1000], {}), "16": ([7] * 15 + [4000], {}),
    "verify": ([70, 9], {"rows_per_request": 4, "lengths_are_prefix": True}),
}  # fmt: skip


class Gpu:
    """Layers of one geometry on the current GPU, and steps of them."""

    def __init__(self, g, step):
        isa, grid, objects = on_this_gpu()
        objects.require_resident(grid)
        self.g, self.weights = g, random_weights(g, seed=FRESH)
        layers = [layer_to(layer, torch.device("cuda")) for layer in self.weights.layers]
        self.kernels = Monokernels(
            g, layers, self.weights.cos_sin.cuda(), isa=isa, grid=grid, widths=[(step.rows, step.rows_per_request)], deadline_s=5.0,
            objects=objects,
        )  # fmt: skip
        self.k, self.v, self.table = [b.cuda() for b in step.k_buffers], [b.cuda() for b in step.v_buffers], step.req_to_token.cuda()
        self.kernels.attach_kv(self.k, self.v, self.table)
        self.inputs = step_inputs(step, torch.device("cuda"))
        self.x, self.step = self.weights.embedding[step.input_ids].cuda(), step

    def launch(self):
        self.kernels.launch(self.x, self.inputs, torch.cuda.current_stream().cuda_stream)

    def poison_kv(self):
        """NaN where the step writes K and V, so that a row that is not written differs."""
        for buffer in (*self.k, *self.v):
            buffer[self.inputs.out_cache_loc] = float("nan")

    def outputs(self):
        torch.cuda.synchronize()
        assert self.kernels.fault() is None
        rows = self.step.rows
        stream = self.kernels.x[:rows].cpu().float() + self.kernels.residuals[0][:rows].cpu().float()
        hidden = dense_decode.rms_norm(stream, self.weights.final_norm, self.g.rms_eps).bfloat16()
        own = dataclasses.replace(self.step, k_buffers=[b.cpu() for b in self.k], v_buffers=[b.cpu() for b in self.v])
        return StepOutputs(hidden, *read_kv_rows(own))


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("g", [QWEN3_0_6B, QWEN3_8B], ids=["0.6b", "8b"])
def test_gate(g, case):
    lengths, options = STEPS[case]
    gpu = Gpu(g, random_step(g, lengths, seed=FRESH, **options))
    gpu.kernels.poison()
    gpu.launch()
    report = gate(g, gpu.weights, gpu.step, gpu.outputs())
    assert report.passed, f"seed {FRESH}\n{report}"
    assert gpu.kernels.executed() == {gpu.step.rows: 1}


@pytest.mark.parametrize("case", STEPS)
def test_moe_gate(case):
    lengths, options = STEPS[case]
    gpu = Gpu(QWEN3_30B_A3B, random_step(QWEN3_30B_A3B, lengths, seed=FRESH, **options))
    gpu.kernels.poison()
    gpu.launch()
    ours, logits = gpu.outputs(), gpu.kernels.routed_logits[:, : gpu.step.rows].cpu()
    report = moe_gate(gpu.g, gpu.weights, gpu.step, ours, logits)
    assert report.passed, f"seed {FRESH}\n{report}"


def test_a_replayed_graph_gives_the_same_bits():
    gpu = Gpu(QWEN3_0_6B, random_step(QWEN3_0_6B, [70, 9], seed=FRESH))
    gpu.poison_kv()
    gpu.launch()
    first = gpu.outputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.launch()
    for _ in range(20):
        gpu.kernels.poison()
        gpu.poison_kv()
        graph.replay()
        again = gpu.outputs()
        assert torch.equal(again.hidden, first.hidden) and torch.equal(again.k_rows, first.k_rows) and torch.equal(again.v_rows, first.v_rows)
    assert gpu.kernels.executed() == {2: 21}


def test_a_step_is_two_launches_a_layer():
    """As the GPU's own profiler counts them."""
    gpu = Gpu(QWEN3_0_6B, random_step(QWEN3_0_6B, [70, 9], seed=FRESH))
    gpu.launch()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gpu.launch()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA and "mem" not in event.name.lower()]
    assert len(kernels) == 2 * QWEN3_0_6B.num_layers, kernels


RANKS = [(2, 1), (4, 1), (2, 2)]  # ranks, GPUs


def require_gpus(num_gpus):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")


@pytest.mark.parametrize(("num_ranks", "num_gpus"), RANKS)
@pytest.mark.parametrize("case", ["1", "6", "verify"])
def test_ranks_pass_the_gate_with_the_same_bits(num_ranks, num_gpus, case):
    require_gpus(num_gpus)
    (lengths, options), weights = STEPS[case], random_weights(QWEN3_8B, seed=FRESH)
    step = random_step(QWEN3_8B, lengths, seed=FRESH, **options)
    group = RanksInOneProcess(QWEN3_8B, weights, step, num_ranks, num_gpus)
    group.launch()
    first = group.outputs()
    assert (report := gate(QWEN3_8B, weights, step, first)).passed, f"seed {FRESH}\n{report}"
    for _ in range(20):
        group.launch()
    assert torch.equal(group.outputs().hidden, first.hidden)
    assert all(kernels.executed() == {step.rows: 21} for kernels in group.ranks)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_tiles_that_are_withheld_stop_every_rank_under_its_deadline(num_gpus):
    require_gpus(num_gpus)
    script = Path(__file__).with_name("faulty_monokernel.py")
    result = subprocess.run([sys.executable, script, str(num_gpus)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("monokernel stopped: ")]
    assert [int(re.search(r"stopped: rank (\d)", line)[1]) for line in lines] == [0, 1], result.stdout
    assert any(re.search(r" waited 0\.[23]\d s for rank 2's part of tile \d+ of layer 0", line) for line in lines), result.stdout
    seconds = float(re.search(r"record after ([0-9.]+) s", result.stdout)[1])
    assert 0.1 < seconds < 1.0 and "trapped after " in result.stdout, result.stdout
