"""k1 and k2 on a GPU: what launches them there, and several ranks of a model in one process, on one GPU or on as many as there are."""

from __future__ import annotations

import dataclasses

import torch
from monokernel_cases import shard_geometry, shard_layer, shard_step

from sgl_lowlatency.kernels.code_objects import COMPUTE_UNITS
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.hip import HipRuntime
from sgl_lowlatency.kernels.monokernel import MonoInputs, Monokernels, mono_layout
from sgl_lowlatency.kernels.monokernel_objects import MonokernelObjects
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, prepare
from sgl_lowlatency.reference import dense_decode
from sgl_lowlatency.reference.step import StepInputs, StepOutputs, read_kv_rows

INPUTS = ("positions", "out_cache_loc", "seq_lens", "req_pool_indices")


def on_this_gpu():
    """(instruction set, workgroups, what launches them) of the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is None:
        from sgl_lowlatency.kernels.monokernel_cuda import ISA, MonokernelCuda

        return ISA, properties.multi_processor_count, MonokernelCuda()
    isa = properties.gcnArchName.split(":")[0]
    return isa, COMPUTE_UNITS[isa], MonokernelObjects(HipRuntime(), isa, properties.multi_processor_count)


def layer_to(layer: LayerTensors, device: torch.device) -> LayerTensors:
    moved = {name: value.to(device) for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(layer, **moved)


def step_inputs(step: StepInputs, device: torch.device) -> MonoInputs:
    return MonoInputs(*(getattr(step, name).to(device) for name in INPUTS), step.rows_per_request, step.lengths_are_prefix)


class RanksInOneProcess:
    """num_ranks ranks of a model and a step of it, each with workgroups, a stream and a pool of its own; rank r is on GPU r % num_gpus, which its
    ranks share by workgroups. live_ranks: the others are never launched."""

    def __init__(
        self, g: Geometry, weights: DecodeStepWeights, step: StepInputs, num_ranks: int, num_gpus: int = 1, deadline_s: float = 5.0,
        live_ranks: int | None = None,
    ):
        self.g, self.weights, self.step, self.live_ranks = g, weights, step, num_ranks if live_ranks is None else live_ranks
        self.devices = [torch.device("cuda", rank % num_gpus) for rank in range(num_ranks)]
        for device in set(self.devices):  # a copy makes torch map the other GPU's memory
            for other in set(self.devices):
                torch.zeros(1, device=device).to(other)
        workspaces = self._workspaces(num_ranks, step.rows)
        self.ranks, self.inputs, self.pools, self.x, self.streams = [], [], [], [], []
        for rank, device in enumerate(self.devices):
            with torch.cuda.device(device):
                isa, units, objects = on_this_gpu()
                layers = [layer_to(shard_layer(g, layer, rank, num_ranks), device) for layer in weights.layers]
                own = shard_step(step, rank, num_ranks)
                pool = dataclasses.replace(own, k_buffers=[b.to(device) for b in own.k_buffers], v_buffers=[b.to(device) for b in own.v_buffers])
                kernels = Monokernels(
                    shard_geometry(g, num_ranks), layers, weights.cos_sin.to(device), isa=isa, grid=units * num_gpus // num_ranks,
                    widths=[(step.rows, step.rows_per_request)], deadline_s=deadline_s, rank=rank, workspaces=workspaces, objects=objects,
                )  # fmt: skip
                kernels.attach_kv(pool.k_buffers, pool.v_buffers, own.req_to_token.to(device))
                self.ranks.append(kernels)
                self.pools.append(pool)
                self.inputs.append(step_inputs(step, device))
                self.x.append(weights.embedding[step.input_ids].to(device))
                self.streams.append(torch.cuda.Stream(device))
        self.synchronize()

    def _workspaces(self, num_ranks: int, rows: int) -> MappedWorkspaces:
        layout, views = mono_layout(num_ranks, rows, self.g.hidden), []
        for device in self.devices:
            memory = torch.empty(layout.total_bytes + 128, dtype=torch.uint8, device=device)
            begin = -memory.data_ptr() % 128
            views.append(memory[begin : begin + layout.total_bytes])
            prepare(views[-1], layout)
        return MappedWorkspaces(0, tuple(view.data_ptr() for view in views), layout, owner=views)

    def synchronize(self) -> None:
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def launch(self) -> None:
        for kernels, x, inputs, stream, _ in zip(self.ranks, self.x, self.inputs, self.streams, range(self.live_ranks)):
            with torch.cuda.device(kernels.device), torch.cuda.stream(stream):
                kernels.launch(x, inputs, stream.cuda_stream)

    def faults(self) -> list:
        return [record for kernels in self.ranks if (record := kernels.fault()) is not None]

    def acknowledge_faults(self) -> None:
        for kernels in self.ranks:
            if kernels.fault() is not None:
                kernels.acknowledge_fault()

    def outputs(self) -> StepOutputs:
        """Behind a launch; every rank's stream has the bits of rank 0's."""
        self.synchronize()
        assert self.faults() == []
        rows = self.step.rows
        streams = [(kernels.x[:rows].cpu(), kernels.residuals[0][:rows].cpu()) for kernels in self.ranks]
        for rank, stream in enumerate(streams):
            assert all(map(torch.equal, stream, streams[0])), f"rank {rank} has another stream than rank 0"
        x, residual = streams[0]
        hidden = dense_decode.rms_norm(x.float() + residual.float(), self.weights.final_norm, self.g.rms_eps).bfloat16()
        pools = [dataclasses.replace(pool, k_buffers=[b.cpu() for b in pool.k_buffers], v_buffers=[b.cpu() for b in pool.v_buffers]) for pool in self.pools]
        rows_of = [read_kv_rows(pool) for pool in pools]
        return StepOutputs(hidden, *(torch.cat([of_rank[i] for of_rank in rows_of], 2) for i in range(2)))
