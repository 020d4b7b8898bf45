"""Random MoE layers at real scale as SGLang holds them on sm_90, and launches of fused_moe compared with the oracle."""

import torch
from hyper_connection_cases import empty_post, post_problems, random_streams, seeded_hyper

from sgl_lowlatency.kernels.fused_moe import POINTS, SMEM_BYTES, FusedMoe, FusedMoeWeights, RoutingRecord
from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.reference import gate

ALT_TOKEN = 77
LOGITS_REL_L2 = 1e-5  # of fp32 sums, a tensor core's too: 1e-7 to 1e-6; a wrong column or row is 1e-3 and more


def block_scales(generator, device, *shape):
    """e8m0 bytes around a spread of 2 octaves, another one for each row and group: a scale taken from a neighbour is wrong."""
    return torch.randint(0, 4, shape, generator=generator, device=device)


def fp4_matrix(generator, device, experts, rows, columns):
    """(stored, stored scale): every byte is two values; of standard deviation about 1.7 / sqrt(columns)."""
    stored = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator, device=device, dtype=torch.uint8)
    base = 127 - round(torch.tensor(8.0 * columns**0.5).log2().item())
    return stored, (base + block_scales(generator, device, experts, rows // 64, columns // 128, 16, 16)).to(torch.uint8)


def fp8_matrix(generator, device, rows, columns):
    exponents = block_scales(generator, device, rows // 32, columns // 32) - 5
    weight = torch.randn(rows, columns, generator=generator, device=device) * 8
    return weight.to(torch.float8_e4m3fn), torch.exp2(exponents.float() - round(torch.tensor(columns**0.5).log2().item()))


def random_weights(hidden, intermediate, num_experts, top_k, device="cpu", seed=0, limit=10.0, alt=False):
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, std=1.0):
        return torch.randn(*shape, generator=generator, device=device) * std

    gate_up, gate_up_scale = fp4_matrix(generator, device, num_experts, 2 * intermediate, hidden)
    down, down_scale = fp4_matrix(generator, device, num_experts, hidden, intermediate)
    shared_gate_up, shared_gate_up_scale = fp8_matrix(generator, device, 2 * intermediate, hidden)
    shared_down, shared_down_scale = fp8_matrix(generator, device, hidden, intermediate)
    return FusedMoeWeights(
        normal(num_experts, hidden, std=hidden**-0.5).bfloat16(), normal(num_experts, std=0.1), gate_up, gate_up_scale, down, down_scale,
        shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale, top_k, 1.5, limit,
        normal(num_experts, std=0.1) if alt else None, ALT_TOKEN if alt else -1,
    )  # fmt: skip


class Moe:
    """A layer and the kernel. Results are of the newest launch, on the CPU."""

    def __init__(
        self, hidden=256, intermediate=128, num_experts=32, top_k=3, max_rows=48, grid=4, device="cpu", emulation=None, weights=None,
        smem_limit=SMEM_BYTES, **kwargs,
    ):  # fmt: skip
        self.device = torch.device(device)
        self.weights = weights or random_weights(hidden, intermediate, num_experts, top_k, device, **kwargs)
        self.num_experts, self.top_k, self.hidden = num_experts, top_k, hidden
        self.kernel = FusedMoe(
            hidden, intermediate, num_experts, top_k, max_rows, self.device, grid, deadline_s=2.0, emulation=emulation, smem_limit=smem_limit
        )
        self.hyper = seeded_hyper(hidden, 0, device)
        self.layer = self.kernel.prepare(self.weights, hyper=self.hyper)

    def inputs(self, rows, seed=0):
        """x, and token ids of which some are the alternative one where the layer has a bias for it."""
        generator = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(rows, self.hidden, generator=generator).bfloat16().to(self.device)
        ids = torch.where(torch.arange(rows) % 3 == 1, ALT_TOKEN, torch.arange(rows)).to(self.device)
        return x, ids if self.weights.bias_alt is not None else None

    def streams(self, rows, seed=0):
        return random_streams(rows, self.hidden, seed, self.device)

    def run(self, x, token_ids=None, num_live_rows=None, stream=0, streams=None):
        """streams: the launch has mix and post too."""
        rows = x.shape[0]
        self.out = torch.full((rows, self.hidden), float("nan"), dtype=torch.bfloat16, device=self.device)
        self.post = {} if streams is None else empty_post(rows, self.hidden, self.device)
        self.record = RoutingRecord(
            torch.full((rows, self.top_k), -7, dtype=torch.int32, device=self.device),
            torch.full((rows, self.top_k), float("nan"), device=self.device),
            torch.full((rows, self.num_experts), float("nan"), device=self.device),
        )
        live = None if num_live_rows is None else torch.tensor([num_live_rows], dtype=torch.int32, device=self.device)
        self.trace = torch.zeros(self.kernel.grid, len(POINTS), dtype=torch.int64, device=self.device)
        self.kernel.launch(self.layer, x, self.out, token_ids, live, self.record, stream, self.trace, streams, **self.post)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def problems(self, x, token_ids=None, num_live_rows=None, streams=None):
        """What is wrong with the newest launch: logits, output and streams through the numerics gate, coefficients beyond fp32 rounding, choices by
        the rule on the kernel's own logits, exactly where no other choice is within fp32 rounding."""
        rows, found = x.shape[0], []
        wanted = oracle.logits(self.weights, x)
        figure = gate.figure("logits", self.record.logits, oracle.standard_logits(self.weights, x), wanted)
        if not (figure.ours_rel_l2 < LOGITS_REL_L2 and figure.num_not_finite == 0):
            found.append(f"logits: {figure}")
        tokens = None if token_ids is None else token_ids.cpu()
        ids, weights, is_decided = oracle.route(to_cpu(self.weights), self.record.logits.cpu(), tokens, num_live_rows)
        if int(is_decided.sum()) < rows * 0.9:
            found.append(f"only {int(is_decided.sum())} of {rows} rows are decided")
        found += [f"row {r} chose {self.record.ids[r].tolist()}, not {ids[r].tolist()}"
                  for r in range(rows) if is_decided[r] and self.record.ids[r].tolist() != ids[r].tolist()]  # fmt: skip
        if not bool((self.record.weights.cpu().double()[is_decided] - weights[is_decided]).abs().max() < 1e-5):
            found.append("weights differ from the rule's")
        own = self.record.ids.long(), self.record.weights
        if int(own[0].min()) < -1 or int(own[0].max()) >= self.num_experts:
            return [*found, "ids out of range"]
        wanted, standard = oracle.outputs(self.weights, x, *own)
        if not bool((self.trace[:, 0] > 0).all() and (self.trace.diff(dim=1) >= 0).all()):
            found.append(f"times are not in order: {self.trace.tolist()}")
        self.figure = gate.figure("out", self.out, standard, wanted)
        if not self.figure.passed:
            found.append(str(self.figure))
        return found if streams is None else found + post_problems(self.post, self.hyper, streams, (wanted, standard))


def to_cpu(weights):
    """What route reads of a layer's weights."""
    from dataclasses import replace

    return replace(weights, bias=weights.bias.cpu(), bias_alt=None if weights.bias_alt is None else weights.bias_alt.cpu())
