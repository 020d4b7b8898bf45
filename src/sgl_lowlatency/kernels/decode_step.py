"""decode_step: a decode step of a decoder, embedding to final norm or to the logits, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors, RoutingRecord, require_tensor, require_weights
from sgl_lowlatency.kernels.fault import DecodeStepFault, describe_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.host_words import COUNTER_BYTES, FAULT_BYTES, GROUP_BYTES, HostWords, kernel_device
from sgl_lowlatency.kernels.rank_group import RankGroup

if TYPE_CHECKING:
    from sgl_lowlatency.plan.static_plan import StaticPlan

__all__ = ["DecodeStep", "DecodeStepWeights", "EmulationOptions", "LayerTensors"]

_ROW_INPUTS = ("input_ids", "positions", "out_cache_loc")
_REQUEST_INPUTS = ("seq_lens", "req_pool_indices")


@dataclasses.dataclass
class EmulationOptions:
    """How host emulation runs. seed: of the schedule. planted: a dialect::Planted bug. starvation: -1 by seed, 0 even,
    1 starves a block, 2 a warp, 3 favours a block. check_order: find accesses that nothing orders (slower)."""

    seed: int = 0
    planted: int = 0
    starvation: int = -1
    check_order: bool = False


class DecodeStep:
    """Owns the workspace of the kernel and what outlives its launches, and launches it.

    geometry: sizes; max_position must be the rows of weights.cos_sin. plans: rows -> StaticPlan, all of one grid, sharing
    one workspace; a plan's rows_per_request says how a step of that many rows is made up. weights: read in place, must stay alive and unmoved. deadline_s: of every wait in the kernel.
    group: of a tensor-parallel step, whose geometry and weights are then a rank's share; None: it is alone.
    timeline: of a group's step, which is timed then: int64 [grid, num_layers, points] on the device, gets the clock at abi::TimelinePoint's points.
    For benchmarks and tests: decode steps of bf16 dense layers, up to MAX_TIMED_ROWS rows. None: the served step.
    Raises ValueError for a tensor or plan that does not fit, RuntimeError when the grid cannot be resident on the GPU.
    """

    def __init__(
        self,
        geometry: Geometry,
        plans: dict[int, StaticPlan],
        weights: DecodeStepWeights,
        device: torch.device,
        deadline_s: float,
        emulation: EmulationOptions | None = None,
        group: RankGroup | None = None,
        timeline: torch.Tensor | None = None,
    ):
        device = kernel_device(device)
        if not deadline_s > 0:
            raise ValueError(f"deadline_s {deadline_s} is not positive")
        if not plans:
            raise ValueError("plans is empty")
        grids, sizes = {p.grid for p in plans.values()}, {p.workspace_bytes for p in plans.values()}
        if len(grids) != 1 or len(sizes) != 1:
            raise ValueError(f"plans disagree: grids {sorted(grids)}, workspace bytes {sorted(sizes)}")
        require_weights(geometry, weights, device)
        if {p.ops[0].element_bytes for p in plans.values()} != {weights.element_bytes}:
            raise ValueError(f"the plans are not for {weights.format} weights")
        if {p.head is not None for p in plans.values()} != {weights.lm_head is not None}:
            raise ValueError(f"the plans are not for weights {'without' if weights.lm_head is None else 'with'} an LM head")

        self.geometry, self.device, self.grid, self.group = geometry, device, grids.pop(), group
        if timeline is not None:
            if group is None:
                raise ValueError("timeline: the step has no group")
            require_tensor("timeline", timeline, (self.grid, geometry.num_layers, _C.abi.kTimelinePoints), torch.int64, device)
        self.timeline = timeline
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._failure: str | None = None  # of an emulated launch, in words
        self._weights = weights  # the kernel reads through raw pointers: keep the owners
        self._plans = plans
        self._first_plan = next(iter(plans.values()))
        self.workspace = torch.full((self._first_plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)  # abi::kUnwritten
        self._sync = torch.zeros(_C.abi.kSyncStateBytes, dtype=torch.uint8, device=device)
        self.captured: tuple[int, ...] = ()
        self._layer_table = self._pack_layers()
        is_fp8 = weights.format != "bf16"
        self._scale_table = self._device_table(_C.pack_layer_scales([layer.scale_pointers() for layer in weights.layers])) if is_fp8 else None
        self._map_table = self._device_table(_C.pack_weight_maps(weights.matrices(), is_cuda=device.type == "cuda"))
        self._kv_table = self._kv_owners = self._req_to_token = None
        self._tile_tables = {rows: self._tile_table(plan) for rows, plan in plans.items()}
        self._host = HostWords(device, FAULT_BYTES + GROUP_BYTES + COUNTER_BYTES)  # the fault record, whom it must tell, the executed counters
        if group is not None:
            group.name_in(self._host.address, self._host.address + FAULT_BYTES)
        self._counters = self._host.address + FAULT_BYTES + GROUP_BYTES
        self._params = {rows: self._make_params(rows, plan, deadline_s) for rows, plan in plans.items()}

    @property
    def weights(self) -> DecodeStepWeights:
        return self._weights

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside SGLang's own tensors."""
        tables = [self._layer_table, self._map_table, *self._tile_tables.values(), *([] if self._scale_table is None else [self._scale_table])]
        shared = 0 if self.group is None else self.group.workspaces.layout.total_bytes
        return shared + sum(t.numel() * t.element_size() for t in [self.workspace, self._sync, *tables])

    def attach_kv(self, k_buffers: list[torch.Tensor], v_buffers: list[torch.Tensor], req_to_token: torch.Tensor) -> None:
        """Names the KV pool: one [slots, num_kv_heads, head_dim] bf16 tensor a layer for k and for v, all alike, and
        req_to_token int32 [requests, max tokens]. Call before the first launch, outside graph capture."""
        g = self.geometry
        if len(k_buffers) != g.num_layers or len(v_buffers) != g.num_layers:
            raise ValueError(f"KV pool has {len(k_buffers)} k and {len(v_buffers)} v layers, the model {g.num_layers}")
        slots = k_buffers[0].shape[0]
        for name, buffers in (("k", k_buffers), ("v", v_buffers)):
            for layer, buffer in enumerate(buffers):
                require_tensor(f"{name} cache of layer {layer}", buffer, (slots, g.num_kv_heads, g.head_dim), torch.bfloat16, self.device)
        if req_to_token.dim() != 2:
            raise ValueError(f"req_to_token has {req_to_token.dim()} dimensions, not 2")
        most = max(plan.rows_per_request for plan in self._plans.values())
        if req_to_token.shape[1] < most:
            raise ValueError(f"req_to_token has {req_to_token.shape[1]} columns, a request may have {most} new tokens")
        require_tensor("req_to_token", req_to_token, tuple(req_to_token.shape), torch.int32, self.device)
        self._kv_owners = (k_buffers, v_buffers)
        self._req_to_token = req_to_token
        self._kv_table = self._device_table(_C.pack_kv_layers([[k.data_ptr(), v.data_ptr()] for k, v in zip(k_buffers, v_buffers)]))
        for params in self._params.values():
            geometry = params.geometry
            geometry.kv_slot_stride = g.num_kv_heads * g.head_dim
            geometry.num_kv_slots = slots
            geometry.num_request_rows, geometry.req_to_token_stride = req_to_token.shape
            params.kv = self._kv_table.data_ptr()
            params.req_to_token = req_to_token.data_ptr()
        if self.device.type == "cuda":
            self._require_resident()

    def capture(self, layers: Sequence[int]) -> None:
        """Lets launches from now on hand out the residual stream that enters each of `layers`, ascending: of layer 0 the embedding, of
        layer i what layer i - 1 leaves. [] captures nothing. Call outside graph capture, with no launch in flight.

        Raises ValueError for layers that the model does not have or that do not ascend.
        """
        layers = tuple(layers)
        if list(layers) != sorted(set(layers)) or not all(0 <= layer < self.geometry.num_layers for layer in layers):
            raise ValueError(f"captured layers {list(layers)} are not ascending ones of 0 to {self.geometry.num_layers - 1}")
        self.captured = layers
        self._layer_table.copy_(self._pack_layers())

    def launch(
        self,
        rows: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
        hidden_out: torch.Tensor,
        stream: int = 0,
        lengths_are_prefix: bool = False,
        aux_out: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        routing: RoutingRecord | None = None,
    ) -> None:
        """Runs one step. Inputs int64 on the device; writes hidden_out [rows, hidden] bf16 and the new tokens' KV rows, and where layers
        are captured aux_out [rows, captured layers * hidden] bf16, layer after layer.

        logits: float32 [rows, vocab], written too, rounded to bf16 as SGLang's are; None: this launch ends without the LM head, as every
        one does whose weights have none. routing: of MoE layers, written too, with its streams only where no layers are captured; None:
        nobody looks.

        input_ids, positions and out_cache_loc are [rows]. seq_lens and req_pool_indices are [requests], of which each has the plan's
        rows_per_request rows, one after the other: row r is new token r % rows_per_request of request r // rows_per_request, and
        attends to the request's older tokens and to its new ones up to its own. In decode a request is a row.
        seq_lens counts the new tokens, or with lengths_are_prefix the older ones only, as in SGLang's verify steps. A request shorter
        than the tokens it should count has none: zeros for attention, no KV row written.
        stream: a cudaStream_t; capturable.

        Raises ValueError for a tensor that does not fit; on the CPU, DecodeStepFault with the kernel's own record or
        RuntimeError with the emulation's diagnosis. On CUDA a fault surfaces at the next synchronisation (see fault()).
        Of a tensor-parallel group every rank launches the same step; logits are the rank's columns.
        """
        params, outputs = self.prepare(
            rows, input_ids, positions, seq_lens, req_pool_indices, out_cache_loc, hidden_out, lengths_are_prefix, aux_out, logits, routing
        )
        if self.device.type != "cuda":
            self._emulate(params, outputs)
        elif self.group is None:
            _C.decode_step_launch_cuda(params, self.grid, stream)
        else:
            (_C.parallel_step_launch_cuda if self.timeline is None else _C.timed_step_launch_cuda)(params, self.grid, stream)

    def prepare(
        self,
        rows: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
        hidden_out: torch.Tensor,
        lengths_are_prefix: bool = False,
        aux_out: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        routing: RoutingRecord | None = None,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """The kernel's parameters of a launch, good until the next one of as many rows, and what it writes, by name. See launch."""
        if self._kv_table is None:
            raise RuntimeError("attach_kv was not called")
        if rows not in self._params:
            raise ValueError(f"rows {rows} has no plan; there are plans for {sorted(self._params)}")
        params = self._params[rows]
        params.counted_tokens = 0 if lengths_are_prefix else params.rows_per_request
        for names, count, tensors in (
            (_ROW_INPUTS, rows, (input_ids, positions, out_cache_loc)),
            (_REQUEST_INPUTS, rows // params.rows_per_request, (seq_lens, req_pool_indices)),
        ):
            for name, tensor in zip(names, tensors):
                require_tensor(name, tensor, (count,), torch.int64, self.device)
                setattr(params, name, tensor.data_ptr())
        require_tensor("hidden_out", hidden_out, (rows, self.geometry.hidden), torch.bfloat16, self.device)
        params.hidden_out = hidden_out.data_ptr()
        if (aux_out is not None) != bool(self.captured):
            raise ValueError(f"aux_out is {'missing' if self.captured else 'given'}, the captured layers are {list(self.captured)}")
        if aux_out is not None:
            require_tensor("aux_out", aux_out, (rows, len(self.captured) * self.geometry.hidden), torch.bfloat16, self.device)
        params.logits = 0
        if logits is not None:
            if self._weights.lm_head is None:
                raise ValueError("logits: the weights have no LM head")
            require_tensor("logits", logits, (rows, self.geometry.vocab), torch.float32, self.device)
            params.logits = logits.data_ptr()
        params.routed_ids = params.routed_logits = 0
        if routing is not None:
            g = self.geometry
            if not g.is_moe:
                raise ValueError("routing: the layers are dense")
            require_tensor("routing.ids", routing.ids, (g.num_layers, rows, g.top_k), torch.int32, self.device)
            require_tensor("routing.logits", routing.logits, (g.num_layers, rows, g.num_experts), torch.bfloat16, self.device)
            params.routed_ids, params.routed_logits = routing.ids.data_ptr(), routing.logits.data_ptr()
            if routing.streams is not None:
                if self.captured:
                    raise ValueError(f"routing.streams: the step hands out the streams of captured layers {list(self.captured)} instead")
                require_tensor("routing.streams", routing.streams, (rows, g.num_layers, g.hidden), torch.bfloat16, self.device)
                aux_out = routing.streams.view(rows, -1)
        params.aux_out, params.aux_columns = (0, 0) if aux_out is None else (aux_out.data_ptr(), aux_out.shape[1])
        outputs = {"hidden_out": hidden_out, "aux_out": aux_out, "logits": logits}
        outputs |= {} if routing is None else {"routed_ids": routing.ids, "routed_logits": routing.logits}
        return params, {name: out for name, out in outputs.items() if out is not None}

    def executed(self) -> dict[int, int]:
        """Completed launches by rows, counted on the device; rows that never ran are left out."""
        return {rows: count for rows, count in enumerate(_C.read_executed(self._counters)) if count}

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def buffer(self, name: str, rows: int, layer: int) -> torch.Tensor:
        """A hand-over buffer of a layer of the newest launch, which had `rows` rows, as a tensor: for tests and diagnosis.

        Layer -1 is the embedding's. Buffers of the last GENERATIONS - CLEAR_AHEAD layers hold what that launch put there.
        """
        plan = self._plans[rows]
        buffer = plan.buffer(name)
        first = self.sync_words(_C.abi.kFirstGenerationOffset, 1)[0] - self.geometry.num_layers
        begin = (first + layer) % abi.GENERATIONS * plan.generation_bytes + buffer.offset
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[buffer.dtype]
        return self.workspace[begin : begin + buffer.bytes].view(dtype).view(buffer.shape)

    def sync_words(self, offset: int, count: int) -> list[int]:
        """int32 words of abi::SyncState from a byte offset (_C.abi.k…Offset): for tests and diagnosis."""
        return self._sync[offset : offset + 4 * count].view(torch.int32).tolist()

    def _device_table(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _pack_layers(self) -> torch.Tensor:
        # A launch without aux_out reads no column, so MoE layers, whose models capture none, have theirs for a record at any time.
        kept = self.captured or range(self.geometry.num_layers if self.geometry.is_moe else 0)
        column = {layer: slot * self.geometry.hidden for slot, layer in enumerate(kept)}
        return self._device_table(_C.pack_layer_weights([w.fields(column.get(layer, -1)) for layer, w in enumerate(self._weights.layers)]))

    def _tile_table(self, plan: StaticPlan) -> torch.Tensor:
        """[grid][abi::kNumMatrices] ranges by abi::OpIdx; empty ones of what the step does not have, and of what routing shares out."""
        owned = {abi.OP_INDEX[op.name]: op.tiles for op in plan.matrices}
        ranges = zip(*(owned.get(index, [(0, 0)] * plan.grid) for index in range(abi.NUM_MATRICES)), strict=True)
        return self._device_table(_C.pack_tile_ranges([list(own) for of_block in ranges for own in of_block]))

    def _make_params(self, rows: int, plan: StaticPlan, deadline_s: float):
        if plan.rows != rows:
            raise ValueError(f"the plan for rows {rows} was made for {plan.rows}")
        if self.timeline is not None:
            params = _C.abi.TimedStepParams()
            params.timeline = self.timeline.data_ptr()
        else:
            params = _C.abi.DecodeStepParams() if self.group is None else _C.abi.ParallelStepParams()
        if self.group is not None:
            self.group.fill(params, self.geometry.vocab)
            params.rank = self.group.rank
        params.geometry = abi.geometry_struct(self.geometry)
        for op in plan.matrices:
            params.set_op(abi.OP_INDEX[op.name], op.k_extent, op.k_panel, op.num_tiles)
        params.rows, params.rows_per_request = rows, plan.rows_per_request
        params.weights = abi.WEIGHT_FORMATS[self._weights.format]
        params.num_stages, params.max_panel_bytes, params.max_tiles_multi_panel = plan.num_stages, plan.max_panel_bytes, plan.max_tiles_multi_panel
        routing_bytes = abi.routing_bytes(self.geometry, rows)
        params.shared = abi.smem_layout(rows, plan.max_panel_bytes, plan.max_tiles_multi_panel, plan.num_stages, routing_bytes)
        params.moe, params.panel_pairs = abi.moe_layout(self.geometry, rows), plan.panel_pairs
        params.deadline_ns = int(deadline_s * 1e9)
        params.scales = 0 if self._scale_table is None else self._scale_table.data_ptr()
        params.layers, params.maps = self._layer_table.data_ptr(), self._map_table.data_ptr()
        params.tiles = self._tile_tables[rows].data_ptr()
        params.embedding, params.final_norm = self._weights.embedding.data_ptr(), self._weights.final_norm.data_ptr()
        params.cos_sin = self._weights.cos_sin.data_ptr()
        params.handover, params.generation_bytes = self.workspace.data_ptr(), plan.generation_bytes
        params.at = abi.handover_layout(self.geometry, rows, plan.grid, plan.rows_per_request)
        params.counted_tokens = plan.rows_per_request  # until a launch says otherwise
        params.stream = abi.stream_layout(self.geometry, rows)
        params.sync = self._sync.data_ptr()
        params.fault, params.executed_mirror = self._host.address, self._counters
        return params

    def _require_resident(self) -> None:
        for rows, params in self._params.items():
            with torch.cuda.device(self.device):
                if self.group is None:
                    blocks = _C.decode_step_max_blocks(params)
                else:
                    blocks = _C.parallel_step_max_blocks(params, False) if self.timeline is None else _C.timed_step_max_blocks(params)
            if blocks < self.grid:
                raise RuntimeError(f"decode_step for {rows} rows needs {self.grid} blocks resident at once; this GPU holds {blocks}")

    def regions(self, outputs: dict[str, torch.Tensor]) -> list[tuple[str, int, int, bool]]:
        """Memory whose ordering host emulation checks: (name, address, bytes, reads too)."""
        step = self._first_plan.generation_bytes
        regions = [(f"generation {i}", self.workspace.data_ptr() + i * step, step, True) for i in range(abi.GENERATIONS)]
        regions += [(name, out.data_ptr(), out.numel() * out.element_size(), True) for name, out in outputs.items()]
        for name, buffers in zip(("k_cache", "v_cache"), self._kv_owners):
            regions += [(f"{name}[{i}]", b.data_ptr(), b.numel() * 2, True) for i, b in enumerate(buffers)]
        return regions

    def _emulate(self, params, outputs: dict[str, torch.Tensor]) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise DecodeStepFault(f"an earlier launch failed: {self._failure}")
        options = self.emulation
        regions = self.regions(outputs) if options.check_order else []
        if self.group is None:
            report = _C.emulation_launch(params, self.grid, options.seed, options.planted, options.starvation, regions)
        else:
            report = (_C.parallel_step_emulate if self.timeline is None else _C.timed_step_emulate)(
                [[params]], self.grid, seed=options.seed, planted=options.planted, starvation=options.starvation, regions=regions,
                is_shared=self.group.workspaces.layout.num_ranks > 1,
            )
        self.last_report = report
        record = self.fault()
        if record is not None:
            self._failure = describe_fault(record)
            raise DecodeStepFault(self._failure)
        if report.status != "ok":
            self._failure = f"decode_step in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)
