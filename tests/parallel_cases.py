"""Groups of ranks that run decode_step's shares of one step, and the whole step they must add up to."""

from __future__ import annotations

import torch
from decode_step_cases import assert_pool_untouched

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.kernels.rank_group import TIMELINE_POINTS
from sgl_lowlatency.kernels.virtual_ranks import VirtualRanks, virtual_groups
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.validate import validate
from sgl_lowlatency.reference.sharding import join_outputs, shard_inputs, shard_weights
from sgl_lowlatency.reference.step import StepOutputs, read_kv_rows


class RankRunner:
    """One DecodeStep a rank, over workspaces in one memory. geometry, weights: the whole model's. rows: that there are plans for.
    is_timed: with a timeline a rank, in `timelines`."""

    def __init__(self, geometry, weights, num_ranks, rows, grid, emulation=None, rows_per_request=None, captured=(), deadline_s=0.05,
                 panel_budget_bytes=64 * 1024, shared_memory_bytes=232448, is_timed=False):
        self.geometry, self.weights, self.num_ranks = geometry, weights, num_ranks
        self.device = weights.embedding.device
        self.local = geometry.shard(num_ranks)
        chains = rows_per_request or {}
        self.shards = [shard_weights(geometry, weights, rank, num_ranks) for rank in range(num_ranks)]
        self.plans = {
            r: make_plan(self.local, r, grid, shared_memory_bytes, panel_budget_bytes, chains.get(r, 1), weights.element_bytes, weights.lm_head is not None)
            for r in rows
        }
        for plan in self.plans.values():
            assert validate(plan) == []
        groups = virtual_groups(num_ranks, max(rows), geometry.hidden, geometry.vocab, self.device)
        points = (grid, geometry.num_layers, len(TIMELINE_POINTS))
        self.timelines = [torch.zeros(points, dtype=torch.int64, device=self.device) if is_timed else None for _ in groups]
        self.is_timed = is_timed
        self.steps = [
            DecodeStep(self.local, self.plans, shard, self.device, deadline_s, group=group, timeline=timeline)
            for shard, group, timeline in zip(self.shards, groups, self.timelines, strict=True)
        ]
        for step in self.steps:
            step.capture(captured)
        self.ranks = VirtualRanks(self.steps, emulation)

    def begin(self, inputs):
        """(of every rank: its copy of the inputs, its poisoned outputs, what its step's `prepare` takes)."""
        begun = []
        for rank, step in enumerate(self.steps):
            used = shard_inputs(inputs, rank, self.num_ranks)
            step.attach_kv(used.k_buffers, used.v_buffers, used.req_to_token)

            def poisoned(width, dtype=torch.bfloat16):
                return torch.full((inputs.rows, width), float("nan"), dtype=dtype, device=self.device)

            hidden = poisoned(self.local.hidden)
            aux = poisoned(len(step.captured) * self.local.hidden) if step.captured else None
            logits = poisoned(self.local.vocab, torch.float32) if self.weights.lm_head is not None else None
            arguments = {
                "rows": inputs.rows, "input_ids": used.input_ids, "positions": used.positions, "seq_lens": used.seq_lens,
                "req_pool_indices": used.req_pool_indices, "out_cache_loc": used.out_cache_loc, "hidden_out": hidden,
                "lengths_are_prefix": used.lengths_are_prefix, "aux_out": aux, "logits": logits,
            }
            begun.append((used, arguments))
        return begun

    def launch(self, begun, apart=False):
        """All ranks at once; or apart, on CUDA, each on a stream of its own as on a GPU of its own."""
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        if not apart:
            self.ranks.launch([arguments for _, arguments in begun], stream)
            return
        self.streams = getattr(self, "streams", None) or [torch.cuda.Stream() for _ in self.steps]
        torch.cuda.synchronize()
        for step, (_, arguments), own in zip(self.steps, begun, self.streams, strict=True):
            step.launch(**arguments, stream=own.cuda_stream)

    def run(self, inputs, routings=None, apart=False):
        """One step of all ranks on copies: every rank's StepOutputs. Checks that of the KV pools only the new tokens' rows changed."""
        begun = self.begin(inputs)
        if routings is not None:
            for (_, arguments), routing in zip(begun, routings, strict=True):
                arguments["routing"] = routing
        self.launch(begun, apart)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for rank, (used, _) in enumerate(begun):
            assert_pool_untouched(shard_inputs(inputs, rank, self.num_ranks), used)
        return [outputs_of(used, arguments) for used, arguments in begun]

    def stream(self, steps, seed=0, planted=0, starvation=-1, launches=None, slowness=(), check_order=True):
        """Several steps in one emulation, each rank running on by itself. steps: StepInputs, all over pools that rank 0's first launch attached.
        launches: of every rank, how many of them it runs; all by default.

        Returns (report, faults in words or None by rank, [rank][step] StepOutputs).
        """
        streams, outputs, results = [[] for _ in self.steps], [], [[] for _ in self.steps]
        written = [{} for _ in self.steps]
        keep = []
        for index, inputs in enumerate(steps):
            begun = self.begin(inputs)
            keep.append((begun, [step._kv_table for step in self.steps]))  # a launch reads its own through raw pointers
            for rank, (used, arguments) in enumerate(begun):
                params, outs = self.steps[rank].prepare(**arguments)
                written[rank] |= {f"{name} {index}": out for name, out in outs.items()}
                if launches is None or index < launches[rank]:
                    streams[rank].append((_C.abi.TimedStepParams if self.is_timed else _C.abi.ParallelStepParams)(params))
                results[rank].append((used, arguments))
        report = (_C.timed_step_emulate if self.is_timed else _C.parallel_step_emulate)(
            streams, self.plans[steps[0].rows].grid, slowness=list(slowness), seed=seed, planted=planted, starvation=starvation,
            regions=self.ranks.regions(written) if check_order else [],
        )
        records = [step.fault() for step in self.steps]
        faults = [None if record is None else describe_fault(record) for record in records]
        outputs = [[outputs_of(used, arguments) for used, arguments in of_rank] for of_rank in results]
        return report, faults, outputs

    def joined(self, outputs):
        return join_outputs(self.geometry, outputs)


def outputs_of(used, arguments) -> StepOutputs:
    aux = arguments["aux_out"]
    layers = None if aux is None else aux.view(used.rows, -1, arguments["hidden_out"].shape[1]).transpose(0, 1)
    return StepOutputs(arguments["hidden_out"], *read_kv_rows(used), arguments["logits"], layers)


def same_streams(outputs: list[StepOutputs]) -> bool:
    """Whether what every rank has whole is bitwise the same on all of them."""
    def bits(tensor):
        return tensor.contiguous().view(torch.int16)

    first = outputs[0]
    return all(torch.equal(bits(one.hidden), bits(first.hidden)) for one in outputs) and (
        first.aux is None or all(torch.equal(bits(one.aux), bits(first.aux)) for one in outputs)
    )

