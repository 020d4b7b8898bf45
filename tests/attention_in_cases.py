"""Random layers at real scale as SGLang holds them on sm_90, and launches of attention_in compared with the oracle."""

import torch
from fused_moe_cases import fp8_matrix

from sgl_lowlatency.kernels.attention_in import HEAD_DIM, HEAD_ROPE, POINTS, AttentionIn, AttentionInSizes, AttentionInWeights, KvPages
from sgl_lowlatency.reference import attention_in as oracle
from sgl_lowlatency.reference import gate

REAL = AttentionInSizes(hidden=5120, lora=1280, heads=64)
SMALL = AttentionInSizes(hidden=256, lora=128, heads=2)
POSITIONS = 97
POISON = 0xAB  # of cache bytes that nobody may touch


def random_weights(sizes, device="cpu", seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)

    def weight(width):
        return (1 + torch.randn(width, generator=generator, device=device) * 0.2).bfloat16()

    angles = torch.arange(POSITIONS, device=device)[:, None] * 0.7 ** torch.arange(HEAD_ROPE // 2, device=device)
    wqkv_a, wq_b = (fp8_matrix(generator, device, *shape) for shape in ((sizes.lora + HEAD_DIM, sizes.hidden), (sizes.heads * HEAD_DIM, sizes.lora)))
    return AttentionInWeights(
        weight(sizes.hidden), *wqkv_a, weight(sizes.lora), weight(HEAD_DIM), *wq_b, torch.polar(torch.ones_like(angles), angles), 1e-6, 2e-6, 3e-6
    )


def empty_cache(device, pages=3, page_size=32, padding=64):
    """Pages that are padded, as SGLang's are."""
    return KvPages(torch.full((pages, page_size * (576 + 8) + padding), POISON, dtype=torch.uint8, device=device), page_size)


class Layer:
    """A layer and the kernel. Results are of the newest launch."""

    def __init__(self, sizes=SMALL, max_rows=48, grid=4, device="cpu", emulation=None, seed=0):
        self.device, self.sizes = torch.device(device), sizes
        self.weights = random_weights(sizes, device, seed)
        self.kernel = AttentionIn(sizes, max_rows, self.device, grid, deadline_s=2.0, emulation=emulation)
        self.layer = self.kernel.prepare(self.weights)

    def inputs(self, rows, seed=0, has_pre=True):
        """streams, pre as attention_out hands it on, positions, and slots in no order."""
        generator = torch.Generator().manual_seed(1000 + seed)
        streams = torch.randn(rows, 4, self.sizes.hidden, generator=generator).bfloat16().to(self.device)
        pre = torch.rand(rows, 24, generator=generator).to(self.device)[:, :4] if has_pre else None
        positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(self.device)
        positions[0] = 0
        return streams, pre, positions, torch.randperm(96, generator=generator)[:rows].int().to(self.device)

    def run(self, streams, pre, positions, slots, stream=0, padding=0):
        rows, z, nan = streams.shape[0], self.sizes, float("nan")

        def poisoned(*shape):
            return torch.full(shape, nan, dtype=torch.bfloat16, device=self.device)

        self.cache, self.x, self.q_lora = empty_cache(self.device), poisoned(rows, z.hidden), poisoned(rows, z.lora)
        self.q = poisoned(rows, z.heads * HEAD_DIM + padding)[:, : z.heads * HEAD_DIM].unflatten(1, (z.heads, HEAD_DIM))
        self.trace = torch.zeros(self.kernel.grid, len(POINTS), dtype=torch.int64, device=self.device)
        self.kernel.launch(self.layer, streams, pre, positions, slots, self.cache, self.x, self.q_lora, self.q, stream, self.trace)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def problems(self, streams, pre, positions, slots):
        """What is wrong with the newest launch: every output through the numerics gate, and the bytes of other slots."""
        wanted, standard = oracle.outputs(self.sizes, self.weights, streams, pre, positions)
        kept = slots >= 0
        found = {"x": self.x, "q_lora": self.q_lora, "q": self.q}
        self.figures = [gate.figure(name, ours, getattr(standard, name), getattr(wanted, name)) for name, ours in found.items()]
        if bool(kept.any()):
            rows = oracle.read_slots(self.cache, slots[kept].long())
            self.figures.append(gate.figure("kv", rows, standard.kv[kept], wanted.kv[kept]))
        problems = [str(figure) for figure in self.figures if not figure.passed]
        if self.untouched(slots[kept].tolist()) is not True:
            problems.append("bytes of other slots, or between pages, were written")
        if not bool((self.trace[:, 0] > 0).all() and (self.trace.diff(dim=1) >= 0).all()):
            problems.append(f"times are not in order: {self.trace.tolist()}")
        return problems

    def untouched(self, slots):
        """Whether everything but these slots is as it was."""
        left, size = self.cache.pages.clone(), self.cache.page_size
        for slot in slots:
            page, at = left[slot // size], slot % size
            page[at * 576 : (at + 1) * 576] = POISON
            page[size * 576 + at * 8 : size * 576 + (at + 1) * 8] = POISON
        return bool(left.eq(POISON).all())
