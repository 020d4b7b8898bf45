"""Virtual ranks of epilogue_multicast on one GPU, with weights and activations of real scale."""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: ranks of which each has a stream must not share a queue

import torch  # noqa: E402

from sgl_lowlatency.kernels.epilogue_multicast import EpilogueMulticast, RankTensors  # noqa: E402
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, virtual_workspaces  # noqa: E402

CUDA = torch.device("cuda")
EPS = 1e-6


def bf16(generator, *shape, scale=1.0):
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(torch.bfloat16)


def num_sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


class VirtualGroup:
    """num_ranks shards of one output projection [hidden, k] in one launch; or, with own_streams, a launch and a stream for each rank."""

    def __init__(self, num_ranks, rows, hidden, k, seed=0, deadline_s=5.0, own_streams=False, live_ranks=None):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.num_ranks, self.k = num_ranks, k
        self.whole = bf16(generator, hidden, k, scale=k**-0.5)
        shards = [shard.contiguous() for shard in self.whole.chunk(num_ranks, dim=1)]
        self.norm_weight = (1 + 0.1 * torch.randn(hidden, generator=generator, device="cuda")).to(torch.bfloat16)
        options = {"blocks_per_rank": num_sms() // num_ranks, "deadline_s": deadline_s, "rms_eps": EPS}
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)] if own_streams else []
        mapped = virtual_workspaces(num_ranks, 16, hidden, CUDA)
        if own_streams:
            views = [MappedWorkspaces(rank, mapped.addresses, mapped.layout, mapped) for rank in range(num_ranks)]
            self.steps = [EpilogueMulticast([shard], self.norm_weight, workspaces=view, **options) for shard, view in zip(shards, views, strict=True)]
        else:
            self.steps = [EpilogueMulticast(shards, self.norm_weight, workspaces=mapped, live_ranks=live_ranks, **options)]
        self.set_inputs(rows, seed + 1)

    def set_inputs(self, rows, seed):
        """Fresh activations of `rows` rows, and outputs that are not numbers."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.activations = bf16(generator, rows, self.k)
        self.residual = bf16(generator, rows, self.whole.shape[0], scale=4.0)
        live = self.steps[0].num_ranks if len(self.steps) == 1 else self.num_ranks
        self.tensors = [
            RankTensors(shard.contiguous(), self.residual, torch.full_like(self.residual, float("nan")), torch.full_like(self.residual, float("nan")))
            for shard in self.activations.chunk(self.num_ranks, dim=1)[:live]
        ]

    def poison(self):
        for one in self.tensors:
            one.sum.fill_(float("nan"))
            one.normed.fill_(float("nan"))

    def launch(self, layer=0, count=1):
        """`count` launches of the same inputs, on the current stream, or every rank's own, which begin behind it and end before it goes on."""
        if not self.streams:
            for _ in range(count):
                self.steps[0].run(self.tensors, layer, torch.cuda.current_stream().cuda_stream)
            return
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)
        for step, one, stream in zip(self.steps, self.tensors, self.streams, strict=True):
            for _ in range(count):
                step.run([one], layer, stream.cuda_stream)
        for stream in self.streams:
            current.wait_stream(stream)

    def oracle(self):
        """(sum, normed) of the unsharded product in float64."""
        total = self.residual.double() + self.activations.double() @ self.whole.double().T
        return total, total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * self.norm_weight.double()

    def standard(self):
        """The same as a bf16 model computes it: a product a rank, an all-reduce of bf16 partial sums, residual and norm."""
        inputs, shards = self.activations.chunk(self.num_ranks, dim=1), self.whole.chunk(self.num_ranks, dim=1)
        partial = torch.stack([x @ w.T for x, w in zip(inputs, shards, strict=True)])
        reduced = partial.float().sum(0).to(torch.bfloat16)
        total = reduced.float() + self.residual.float()
        normed = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
        return total.to(torch.bfloat16), normed.to(torch.bfloat16) * self.norm_weight
