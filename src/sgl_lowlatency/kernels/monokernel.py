"""k1 and k2: a decoder layer in two persistent launches, AMD's kernels. Code objects on a GPU, the same source in host emulation without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.code_objects import COMPUTE_UNITS
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import LayerTensors, RoutingRecord, require_tensor
from sgl_lowlatency.kernels.fault import MonokernelFault, describe_mono_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.host_words import COUNTER_BYTES, FAULT_BYTES, HostWords
from sgl_lowlatency.kernels.monokernel_limits import reasons
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, prepare, symmetric_layout

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.monokernel_objects import MonokernelObjects

__all__ = ["EXCHANGES", "ISAS", "MAX_ROWS", "MonoInputs", "Monokernels", "emulate", "mono_layout", "mono_workspaces"]

EXCHANGES: int = _C.abi.kMonoExchanges  # sums over ranks in a layer

MAX_ROWS: int = _C.abi.kMaxMonoRows
ISAS: tuple[str, ...] = tuple(sorted(_C.abi.kIsas))  # gfx942, gfx950
_ROW_INPUTS, _REQUEST_INPUTS = ("positions", "out_cache_loc"), ("seq_lens", "req_pool_indices")


def mono_layout(num_ranks: int, max_rows: int, hidden: int):
    """SymmetricLayout of a rank's workspace: room for the two sums over ranks of a layer."""
    return symmetric_layout(num_ranks, max_rows, EXCHANGES * hidden)


def mono_workspaces(num_ranks: int, max_rows: int, hidden: int, device: torch.device) -> MappedWorkspaces:
    """Workspaces of `num_ranks` ranks in one device's memory: of one rank, or of emulated ones."""
    layout = mono_layout(num_ranks, max_rows, hidden)
    memory = torch.empty(num_ranks, layout.total_bytes + 128, dtype=torch.uint8, device=device)
    views = []
    for row in memory:
        begin = -row.data_ptr() % 128
        views.append(row[begin : begin + layout.total_bytes])
        prepare(views[-1], layout)
    return MappedWorkspaces(0, tuple(view.data_ptr() for view in views), layout, owner=views)


@dataclasses.dataclass(frozen=True)
class MonoInputs:
    """A step's inputs, int64: positions, out_cache_loc [rows]; seq_lens, req_pool_indices [rows / rows_per_request]. Row r is new token
    r % rows_per_request of request r // rows_per_request. seq_lens counts the new tokens, or with lengths_are_prefix the older ones only."""

    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    rows_per_request: int = 1
    lengths_are_prefix: bool = False


class Monokernels:
    """A rank's layers, the memory that their launches share, and their parameters.

    geometry: the rank's share of heads and channels; max_position the rows of cos_sin. layers: read in place, bf16, with q_norm and k_norm; must stay
    alive and unmoved. cos_sin: float32 [max_position, head_dim]. isa: in ISAS, what emulation imitates. grid: workgroups, all resident at once.
    widths: (rows, rows_per_request) of the steps to come. deadline_s: of a wait for another rank; one for another workgroup has twice that.
    workspaces: the group's (mono_workspaces), made here for a single rank. objects: the kernels as loaded onto the GPU that has the tensors; None:
    host emulation. Raises ValueError for what does not fit.
    """

    def __init__(
        self,
        geometry: Geometry,
        layers: Sequence[LayerTensors],
        cos_sin: torch.Tensor,
        *,
        isa: str,
        grid: int,
        widths: Sequence[tuple[int, int]],
        deadline_s: float,
        rank: int = 0,
        workspaces: MappedWorkspaces | None = None,
        emulation: EmulationOptions | None = None,
        objects: MonokernelObjects | None = None,
    ):
        if isa not in ISAS:
            raise ValueError(f"isa {isa!r} is not one of {', '.join(ISAS)}")
        if not 1 <= grid <= COMPUTE_UNITS[isa]:
            raise ValueError(f"grid {grid} is outside 1..{COMPUTE_UNITS[isa]}, the compute units of {isa}: all workgroups run at once")
        if found := reasons(geometry):
            raise ValueError("; ".join(found))
        if not widths or any(not 1 <= rows <= MAX_ROWS or rows % chain for rows, chain in widths):
            raise ValueError(f"widths {list(widths)} are not steps of 1..{MAX_ROWS} rows, whole requests each")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s {deadline_s} is not positive")
        self.geometry, self.device, self.isa, self.grid, self.rank = geometry, cos_sin.device, isa, grid, rank
        self.widths, self.deadline_s, self.emulation = frozenset(widths), deadline_s, emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated step
        self._objects, self._failure = objects, None  # _failure: of an emulated step, in words
        self._layers, self._cos_sin = list(layers), cos_sin
        self._require_weights()
        self.max_rows = max(rows for rows, _ in widths)
        self.workspaces = workspaces or mono_workspaces(1, self.max_rows, geometry.hidden, self.device)
        self._struct = abi.geometry_struct(geometry)
        most_rows = self.workspaces.layout.max_rows
        most = max(_C.mono_handover(self._struct, rows, most_rows, grid, chain).total_bytes for rows, chain in widths)

        def rows_of(columns: int) -> torch.Tensor:
            return torch.zeros(self.max_rows, columns, dtype=torch.bfloat16, device=self.device)

        self.handover = torch.full((most,), 0xFF, dtype=torch.uint8, device=self.device)  # abi::kUnwritten
        self.state = torch.zeros(_C.abi.kMonoStateBytes, dtype=torch.uint8, device=self.device)
        self.q, self.x = rows_of(geometry.num_q_heads * geometry.head_dim), rows_of(geometry.hidden)
        self.residuals = rows_of(geometry.hidden), rows_of(geometry.hidden)
        shape = (geometry.num_layers, self.max_rows)
        self.routed_ids = torch.full((*shape, geometry.top_k), -1, dtype=torch.int32, device=self.device)  # of the newest step's first rows
        self.routed_logits = torch.zeros(*shape, geometry.num_experts, dtype=torch.bfloat16, device=self.device)
        host_bytes = FAULT_BYTES + COUNTER_BYTES  # the fault record, the executed counters
        self._host = HostWords(self.device, host_bytes) if objects is None else objects.host_memory(host_bytes)
        self._k_buffers = self._v_buffers = self._req_to_token = None

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside SGLang's own tensors and the workspaces."""
        own = (self.handover, self.state, self.q, self.x, *self.residuals, self.routed_ids, self.routed_logits)
        return sum(t.numel() * t.element_size() for t in own)

    def attach_kv(self, k_buffers: list[torch.Tensor], v_buffers: list[torch.Tensor], req_to_token: torch.Tensor) -> None:
        """Names the KV pool: [slots, num_kv_heads, head_dim] bf16 a layer for k and for v, all alike, and req_to_token int32 [requests, tokens]."""
        g = self.geometry
        if not len(k_buffers) == len(v_buffers) == g.num_layers:
            raise ValueError(f"KV pool has {len(k_buffers)} k and {len(v_buffers)} v layers, the model {g.num_layers}")
        slots = k_buffers[0].shape[0]
        for name, buffers in (("k", k_buffers), ("v", v_buffers)):
            for layer, buffer in enumerate(buffers):
                require_tensor(f"{name} cache of layer {layer}", buffer, (slots, g.num_kv_heads, g.head_dim), torch.bfloat16, self.device)
        require_tensor("req_to_token", req_to_token, tuple(req_to_token.shape), torch.int32, self.device)
        self._k_buffers, self._v_buffers, self._req_to_token = k_buffers, v_buffers, req_to_token
        self._struct.kv_slot_stride, self._struct.num_kv_slots = g.num_kv_heads * g.head_dim, slots
        self._struct.num_request_rows, self._struct.req_to_token_stride = req_to_token.shape

    def attach_rope(self, cos_sin: torch.Tensor) -> None:
        """Takes another cos/sin table in place of the constructor's, float32 [max_position, head_dim] of any length: SGLang replaces its own after
        the build. Launches that were captured before read the old one."""
        require_tensor("cos_sin", cos_sin, (cos_sin.shape[0], self.geometry.head_dim), torch.float32, self.device)
        self.geometry = dataclasses.replace(self.geometry, max_position=cos_sin.shape[0])
        self._struct.max_position, self._cos_sin = cos_sin.shape[0], cos_sin

    def params(self, x: torch.Tensor, inputs: MonoInputs, routing: RoutingRecord | None = None, streams: torch.Tensor | None = None) -> list:
        """K1Params and K2Params of every layer of a step, in the order of their launches. x: bf16 [rows, hidden], the embedding, read by the first
        layer. The step leaves its outcome in self.x and self.residuals[0], [rows, hidden] of each, whose sum is the last layer's output.
        routing: whose ids and logits are written too, empty ones of dense layers; None: nobody looks. streams: bf16 [layers, rows, hidden], the
        streams that enter the layers are written there, but for the first one's, which is x.

        Raises ValueError for a tensor that does not fit.
        """
        if self._k_buffers is None:
            raise RuntimeError("attach_kv was not called")
        g, rows = self.geometry, x.shape[0]
        if (rows, inputs.rows_per_request) not in self.widths:
            raise ValueError(f"{rows} rows of {inputs.rows_per_request} a request are not one of the widths {sorted(self.widths)}")
        require_tensor("x", x, (rows, g.hidden), torch.bfloat16, self.device)
        for names, count in ((_ROW_INPUTS, rows), (_REQUEST_INPUTS, rows // inputs.rows_per_request)):
            for name in names:
                require_tensor(name, getattr(inputs, name), (count,), torch.int64, self.device)
        if routing is not None:
            require_tensor("routing.ids", routing.ids, (g.num_layers, rows, g.top_k), torch.int32, self.device)
            require_tensor("routing.logits", routing.logits, (g.num_layers, rows, g.num_experts), torch.bfloat16, self.device)
        if streams is not None:
            require_tensor("streams", streams, (g.num_layers, rows, g.hidden), torch.bfloat16, self.device)
        return [params for layer in range(g.num_layers) for params in self._layer(layer, rows, x, inputs, routing, streams)]

    def launch(self, x: torch.Tensor, inputs: MonoInputs, stream: int = 0, routing: RoutingRecord | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a step, of several ranks at the same time as the others run it: (x, residual), bf16 [rows, hidden] each, overwritten by the next step.

        x, inputs, routing: as of `params`, and routing's streams, if it has any. stream: a hipStream_t; two launches a layer, capturable.
        Raises ValueError for a tensor that does not fit, HipError where the runtime refuses a launch; in emulation MonokernelFault with the kernel's
        own record, RuntimeError with the emulation's diagnosis. On a GPU a fault surfaces at the next synchronisation (see fault()).
        """
        streams = None
        if routing is not None and routing.streams is not None:
            streams = torch.full_like(routing.streams.transpose(0, 1), float("nan"), memory_format=torch.contiguous_format)
            streams[0] = x
        launches = self.params(x, inputs, routing, streams)
        if self._objects is not None:
            self._objects.launch(launches, stream)
        else:
            self._emulate(launches)
        if streams is not None:
            routing.streams.copy_(streams.transpose(0, 1))
        return self.x[: x.shape[0]], self.residuals[0][: x.shape[0]]

    def _emulate(self, launches: list) -> None:
        if self._failure is not None:  # what a step that ended itself left is no state to start from
            raise MonokernelFault(f"an earlier step failed: {self._failure}")
        options, is_shared = self.emulation, self.workspaces.layout.num_ranks > 1
        try:
            self.last_report = emulate([self], [launches], options, self.regions() if options.check_order else [], is_shared=is_shared)
        except RuntimeError as error:
            self._failure = str(error)
            raise

    def poison(self) -> None:
        """NaN wherever the launches of a step leave something for another one or for the caller."""
        for tensor in (self.q, self.x, *self.residuals):
            tensor.fill_(float("nan"))

    def regions(self) -> list[tuple[str, int, int, bool]]:
        """Memory whose ordering emulation can check: hand-over, state, what launches leave each other, the pool, the rank's workspace."""
        named = {"handover": self.handover, "state": self.state, "q": self.q, "x": self.x}
        named |= {f"residual {i}": t for i, t in enumerate(self.residuals)}
        named |= {"routed_ids": self.routed_ids, "routed_logits": self.routed_logits} if self.geometry.is_moe else {}
        for name, buffers in (("k_cache", self._k_buffers), ("v_cache", self._v_buffers)):
            named |= {f"{name}[{i}]": buffer for i, buffer in enumerate(buffers)}
        regions = [(f"rank {self.rank} {name}", t.data_ptr(), t.numel() * t.element_size(), True) for name, t in named.items()]
        return regions + [(f"workspace {self.rank}", self.workspaces.addresses[self.rank], self.workspaces.layout.total_bytes, True)]

    def executed(self) -> dict[int, int]:
        """Completed steps by rows, counted on the device; rows that never ran are left out."""
        return {rows: count for rows, count in enumerate(_C.read_executed(self._host.address + FAULT_BYTES)) if count}

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def _layer(
        self, layer: int, rows: int, x: torch.Tensor, inputs: MonoInputs, routing: RoutingRecord | None, streams: torch.Tensor | None
    ) -> tuple:
        weights, k_pool, v_pool = self._layers[layer], self._k_buffers[layer].data_ptr(), self._v_buffers[layer].data_ptr()
        is_first, launch = layer == 0, self._launch(layer, rows, inputs.rows_per_request)
        k1, k2 = _C.abi.K1Params(), _C.abi.K2Params()
        k1.launch = k2.launch = launch
        k1.x = x.data_ptr() if is_first else self.x.data_ptr()
        entering = self.residuals[1] if streams is None else streams[layer]
        k1.residual, k1.residual_out = (0, 0) if is_first else (self.residuals[0].data_ptr(), entering.data_ptr())
        k1.input_norm, k1.qkv = weights.input_norm.data_ptr(), weights.qkv.data_ptr()
        k1.q_norm, k1.k_norm, k1.cos_sin = weights.q_norm.data_ptr(), weights.k_norm.data_ptr(), self._cos_sin.data_ptr()
        k1.positions, k1.out_cache_loc = inputs.positions.data_ptr(), inputs.out_cache_loc.data_ptr()
        k1.k_pool, k1.v_pool, k1.q_out = k_pool, v_pool, self.q.data_ptr()

        k2.q, k2.k_pool, k2.v_pool = k1.q_out, k_pool, v_pool
        k2.seq_lens, k2.req_pool_indices = inputs.seq_lens.data_ptr(), inputs.req_pool_indices.data_ptr()
        k2.req_to_token = self._req_to_token.data_ptr()
        k2.out_proj, k2.post_norm = weights.out_proj.data_ptr(), weights.post_norm.data_ptr()
        k2.gate_up, k2.down = weights.gate_up.data_ptr(), weights.down.data_ptr()
        k2.router = 0 if weights.router is None else weights.router.data_ptr()
        k2.residual, k2.residual_out = x.data_ptr() if is_first else entering.data_ptr(), self.residuals[0].data_ptr()
        k2.x_out, k2.executed_mirror = self.x.data_ptr(), self._host.address + FAULT_BYTES
        k2.counted_tokens = 0 if inputs.lengths_are_prefix else inputs.rows_per_request
        k2.ends_step = int(layer + 1 == self.geometry.num_layers)
        if self.geometry.is_moe:
            ids, logits = (self.routed_ids, self.routed_logits) if routing is None else (routing.ids, routing.logits)
            k2.routed_ids, k2.routed_logits = ids[layer].data_ptr(), logits[layer].data_ptr()
        return k1, k2

    def _launch(self, layer: int, rows: int, rows_per_request: int):
        launch = _C.abi.MonoLaunch()
        launch.geometry, launch.isa, launch.grid = self._struct, _C.abi.kIsas[self.isa], self.grid
        launch.rows, launch.rows_per_request, launch.layer, launch.rank = rows, rows_per_request, layer, self.rank
        launch.deadline_ns, launch.handover, launch.state = int(self.deadline_s * 1e9), self.handover.data_ptr(), self.state.data_ptr()
        launch.at = _C.mono_handover(self._struct, rows, self.workspaces.layout.max_rows, self.grid, rows_per_request)
        launch.fault, launch.symmetric = self._host.address, self.workspaces.layout
        for rank, address in enumerate(self.workspaces.addresses):
            launch.set_workspace(rank, address)
        return launch

    def _require_weights(self) -> None:
        g, bf16 = self.geometry, torch.bfloat16
        q_size, kv_size, experts = g.num_q_heads * g.head_dim, g.num_kv_heads * g.head_dim, (g.num_experts,) if g.is_moe else ()
        require_tensor("cos_sin", self._cos_sin, (g.max_position, g.head_dim), torch.float32, self.device)
        if len(self._layers) != g.num_layers:
            raise ValueError(f"layers: {len(self._layers)} are not the geometry's {g.num_layers}")
        shapes = {
            "input_norm": (g.hidden,), "qkv": (q_size + 2 * kv_size, g.hidden), "q_norm": (g.head_dim,), "k_norm": (g.head_dim,),
            "out_proj": (g.hidden, q_size), "post_norm": (g.hidden,),
            "gate_up": (*experts, 2 * g.mlp_channels, g.hidden), "down": (*experts, g.hidden, g.mlp_channels),
        } | ({"router": (g.num_experts, g.hidden)} if g.is_moe else {})
        for index, layer in enumerate(self._layers):
            if layer.qkv_bias is not None:
                raise ValueError(f"layers[{index}].qkv_bias: the kernels add none")
            for name, shape in shapes.items():
                if (tensor := getattr(layer, name)) is None:
                    raise ValueError(f"layers[{index}].{name} is missing")
                require_tensor(f"layers[{index}].{name}", tensor, shape, bf16, self.device)


def emulate(
    ranks: Sequence[Monokernels], streams: Sequence[list], options: EmulationOptions, regions: Sequence = (), slowness: Sequence[int] = (),
    is_shared: bool = False,
):  # fmt: skip
    """Runs the launches of several ranks at the same time, and gives the emulation's report. streams: of each rank what its params() gave.
    is_shared: further ranks are other processes.

    Raises MonokernelFault when a rank left a record, RuntimeError with the emulation's diagnosis.
    """
    report = _C.monokernel_emulate(
        list(streams), slowness=list(slowness), seed=options.seed, planted=options.planted, starvation=options.starvation, regions=list(regions),
        is_shared=is_shared,
    )
    records = [record for rank in ranks if (record := rank.fault()) is not None]
    if records:
        raise MonokernelFault("; ".join(map(describe_mono_fault, records)))
    if report.status != "ok":
        raise RuntimeError(f"monokernel in emulation: {report.status}: {report.message}")
    return report
