"""Groups of ranks that run fused_moe's shares of one layer, and the whole layer they must add up to."""

import torch
from fused_moe_cases import ALT_TOKEN, LOGITS_REL_L2, random_weights, to_cpu
from hyper_connection_cases import empty_post, post_problems, random_streams, seeded_hyper

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import describe_moe_fault
from sgl_lowlatency.kernels.fused_moe import POINTS, FusedMoe, RoutingRecord, rank_intermediate
from sgl_lowlatency.kernels.virtual_moe import VirtualMoe, virtual_moe_workspaces
from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.reference import gate


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


def same_record(a, b):
    return all(same_bits(getattr(a, name), getattr(b, name)) for name in ("ids", "weights", "logits"))


class MoeRanks:
    """num_ranks ranks of one layer, each with `share` channels of every expert. Outputs and records are of the newest launch, a rank's each."""

    def __init__(
        self, num_ranks, hidden=256, share=128, num_experts=32, top_k=3, max_rows=48, grid=2, device="cpu", emulation=None, weights=None,
        deadline_s=2.0, **kwargs,
    ):  # fmt: skip
        self.device, self.num_ranks, self.grid, self.deadline_s = torch.device(device), num_ranks, grid, deadline_s
        self.hidden, self.num_experts, self.top_k, self.max_rows = hidden, num_experts, top_k, max_rows
        self.intermediate = share * num_ranks
        self.weights = weights or random_weights(hidden, self.intermediate, num_experts, top_k, device, **kwargs)
        self.shards = [oracle.shard(self.weights, rank, num_ranks) for rank in range(num_ranks)]
        self.emulation = emulation
        self.begin()

    def begin(self):
        """Kernels and workspaces as a server begins with them."""
        mapped = virtual_moe_workspaces(self.num_ranks, self.max_rows, self.hidden, self.device)
        share = rank_intermediate(self.intermediate, self.num_ranks)
        self.kernels = [
            FusedMoe(self.hidden, share, self.num_experts, self.top_k, self.max_rows, self.device, self.grid, self.deadline_s, symmetric=one)
            for one in mapped
        ]
        self.hyper = seeded_hyper(self.hidden, 0, self.device)
        self.layers = [kernel.prepare(shard, 5, self.hyper) for kernel, shard in zip(self.kernels, self.shards, strict=True)]
        self.ranks = VirtualMoe(self.kernels, self.emulation)

    def inputs(self, rows, seed=0):
        """x, and token ids of which some are the alternative one where the layer has a bias for it."""
        x = torch.randn(rows, self.hidden, generator=torch.Generator().manual_seed(1000 + seed)).bfloat16().to(self.device)
        ids = torch.where(torch.arange(rows) % 3 == 1, ALT_TOKEN, torch.arange(rows)).to(self.device)
        return x, ids if self.weights.bias_alt is not None else None

    def empty(self, rows):
        """(poisoned output, poisoned record) of a rank."""
        record = RoutingRecord(
            torch.full((rows, self.top_k), -7, dtype=torch.int32, device=self.device),
            torch.full((rows, self.top_k), float("nan"), device=self.device),
            torch.full((rows, self.num_experts), float("nan"), device=self.device),
        )
        return torch.full((rows, self.hidden), float("nan"), dtype=torch.bfloat16, device=self.device), record

    def streams_of(self, rows, seed=0):
        return random_streams(rows, self.hidden, seed, self.device)

    def run(self, x, token_ids=None, num_live_rows=None, apart=False, streams=None):
        """One launch of all ranks; or apart, on CUDA, each on a stream of its own as on a GPU of its own. streams: with mix and post."""
        live = None if num_live_rows is None else torch.tensor([num_live_rows], dtype=torch.int32, device=self.device)
        made = [self.empty(x.shape[0]) for _ in self.kernels]
        self.outs, self.records = [out for out, _ in made], [record for _, record in made]
        self.traces = [torch.zeros(self.grid, len(POINTS), dtype=torch.int64, device=self.device) for _ in self.kernels]
        self.posts = [{} if streams is None else empty_post(x.shape[0], self.hidden, self.device) for _ in self.kernels]
        arguments = [
            {"x": x, "out": out, "token_ids": token_ids, "num_live_rows": live, "record": record, "trace": trace, "streams": streams, **post}
            for out, record, trace, post in zip(self.outs, self.records, self.traces, self.posts, strict=True)
        ]
        if apart:
            self.streams = getattr(self, "streams", None) or [torch.cuda.Stream() for _ in self.kernels]
            torch.cuda.synchronize()
            for kernel, layer, one, stream in zip(self.kernels, self.layers, arguments, self.streams, strict=True):
                kernel.launch(layer, **one, stream=stream.cuda_stream)
        else:
            self.ranks.launch(self.layers, arguments, torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def problems(self, x, token_ids=None, num_live_rows=None, streams=None):
        """What is wrong with the newest launch: output and streams through the numerics gate, choices by the rule on the kernel's own logits, all of
        it bitwise the same on every rank."""
        found, rows, record = [], x.shape[0], self.records[0]
        for rank in range(1, self.num_ranks):
            found += [] if same_bits(self.outs[rank], self.outs[0]) else [f"rank {rank} has not rank 0's output"]
            found += [] if same_record(self.records[rank], record) else [f"rank {rank} has not rank 0's choices"]
            found += [f"rank {rank} has not rank 0's {name}" for name, own in self.posts[rank].items() if not same_bits(own, self.posts[0][name])]
        logits = gate.figure("logits", record.logits, oracle.standard_logits(self.weights, x), oracle.logits(self.weights, x))
        if not (logits.ours_rel_l2 < LOGITS_REL_L2 and logits.num_not_finite == 0):
            found.append(f"logits: {logits}")
        tokens = None if token_ids is None else token_ids.cpu()
        ids, _, is_decided = oracle.route(to_cpu(self.weights), record.logits.cpu(), tokens, num_live_rows)
        found += [f"row {r} chose {record.ids[r].tolist()}, not {ids[r].tolist()}"
                  for r in range(rows) if is_decided[r] and record.ids[r].tolist() != ids[r].tolist()]  # fmt: skip
        wanted, standard = oracle.outputs_of_ranks(self.shards, x, record.ids.long(), record.weights)
        if not all(bool((trace[:, 0] > 0).all() and (trace.diff(dim=1) >= 0).all()) for trace in self.traces):
            found.append("times are not in order")
        self.figure = gate.figure("out", self.outs[0], standard, wanted)
        found += [] if self.figure.passed else [str(self.figure)]
        return found if streams is None else found + post_problems(self.posts[0], self.hyper, streams, (wanted, standard))

    def stream(
        self, rows, seed=0, planted=0, starvation=-1, launches=None, slowness=(), rows_of=None, grids=None, check_order=True, has_streams=()
    ):
        """Launches of `rows` in one emulation, each rank running on by itself, from a fresh beginning. launches: a rank's number of them each, all by
        default. rows_of: {rank: rows of all of its launches}, for ranks that disagree. grids: a rank's blocks each. The
        launch's number is the layer's. has_streams: launches with mix and post, whose streams_out is the output then.

        Returns (report, faults in words or None by rank, [rank][launch] outputs).
        """
        self.begin()
        streams, outs, keep, regions = [], [], [], []
        for rank, (kernel, layer) in enumerate(zip(self.kernels, self.layers, strict=True)):
            of_rank, stream = [], []
            for launch in range(len(rows) if launches is None else launches[rank]):
                count = (rows_of or {}).get(rank, rows[launch])
                x, out, post = self.inputs(max(rows), launch)[0][:count].contiguous(), self.empty(count)[0], {}
                if launch in has_streams:
                    post = {"streams": self.streams_of(max(rows), launch)[:count].contiguous(), **empty_post(count, self.hidden)}
                keep.append((x, out, post))
                of_rank.append(post.get("streams_out", out))
                params = _C.abi.ParallelMoeParams(kernel.params(layer, x, None if post else out, **post))
                params.layer = launch
                stream.append(params)
            streams.append(stream)
            outs.append(of_rank)
            if check_order:
                used = kernel.regions(of_rank[0] if of_rank else self.empty(1)[0])
                regions += [(f"rank {rank} {name}", *rest) for name, *rest in used if name != "out"]
                regions += [(f"rank {rank} out {i}", out.data_ptr(), out.numel() * 2, True) for i, out in enumerate(of_rank)]
        report = _C.parallel_moe_emulate(
            streams, grids or [self.grid] * self.num_ranks, slowness=list(slowness), seed=seed, planted=planted, starvation=starvation,
            regions=regions,
        )
        records = [kernel.fault() for kernel in self.kernels]
        return report, [None if record is None else describe_moe_fault(record) for record in records], outs


def options(**fields):
    return EmulationOptions(**fields)
