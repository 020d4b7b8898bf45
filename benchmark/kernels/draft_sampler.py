"""GPU time of a DSpark draft's proposal at DeepSeek-V4.1's sizes: SGLang's own (off), draft_sampler (on), on the same tensors in one process.

    python3 -m benchmark.kernels.draft_sampler --out OUT [--shapes 129280x1,32320x4] [--batches 1,2,4] [--walks long,short]

A shape is VOCABxRANKS: that many columns of the vocabulary, shared by so many virtual ranks, each on its part of the GPU. 129280x1 is the whole
proposal on one GPU; 32320x4 reads what one GPU of four reads, with the exchange of four ranks. Off has one rank in both: what its exchange
between GPUs costs is not in it. Off is the final norm (RMSNorm), the LM head (torch.matmul) and draft_markov_block with DeepSeek's Markov head,
captured in a graph as SGLang's draft graph holds them. Walks: "long" is the kernel as it is served; "short" walks through K anew for every tile of a
pair of warps where K is in several panels: `--batches 2,4 --walks long,short` tells what long walks are worth. Requests are greedy (arg-max, no step
logits) or sample at temperature 1. The graphs are replayed back to back between two events, in turn. The floor is the LM head and
markov_w2, each read once, at the measured read bandwidth.

Checked before the times: base logits through the numerics gate; tokens, step logits and the noise offset bit by bit against SGLang's block behind
our base logits. Needs torch, SGLang, a GPU and the package.

Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import types

import torch

from benchmark.common import deadline
from benchmark.kernels import command
from sgl_lowlatency.bench import floors, stats, timing
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels.draft_sampler import MARKOV_RANK, MAX_BATCH, MAX_RANKS, DraftSampler, DraftShard, DraftWeights
from sgl_lowlatency.reference import draft_sampler as oracle
from sgl_lowlatency.reference import gate

HIDDEN, GAMMA, EPS, KEY = 5120, 5, 1e-20, 0x2D2A9C317E44B1D9
WEIGHTS = "random: head normal of variance 9 / hidden; Markov weights -1/4, 0 and 1/4, so that every order of adding gives the same bias; seed 0"


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """VOCABxRANKS, comma list. A rank's part begins at a multiple of 4 and is even."""
    shapes = []
    for word in text.split(","):
        vocab, _, ranks = word.partition("x")
        if not (vocab.isdecimal() and ranks.isdecimal() and 1 <= int(ranks) <= MAX_RANKS and int(vocab) > 0 and int(vocab) % (4 * int(ranks)) == 0):
            raise argparse.ArgumentTypeError(f"{word!r} is not VOCABxRANKS with 1 to {MAX_RANKS} ranks of a multiple of 4 each")
        shapes.append((int(vocab), int(ranks)))
    return tuple(shapes)


def parse_walks(text: str) -> tuple[str, ...]:
    """A comma list of "long" and "short"."""
    if not (words := text.split(",")) or set(words) - {"long", "short"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of long and short")
    return tuple(words)


def floor_bytes(vocab: int, batch: int) -> int:
    """What a proposal must read: the LM head, markov_w2, the hidden states, and a row of markov_w1 a token; bf16."""
    return 2 * (vocab * (HIDDEN + MARKOV_RANK) + batch * GAMMA * (HIDDEN + MARKOV_RANK))


class Tensors:
    """Weights of one vocabulary, and hidden states of MAX_BATCH requests."""

    def __init__(self, vocab: int, device: torch.device, hidden: int = HIDDEN) -> None:
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).mul_(std).bfloat16()

        def few_bits(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).round_().clamp_(-1, 1).div_(4).bfloat16()

        self.vocab = vocab
        self.head, self.norm = normal(vocab, hidden, std=3 * hidden**-0.5), normal(hidden, std=0.1) + 1
        self.w1, self.w2 = few_bits(vocab, MARKOV_RANK), few_bits(vocab, MARKOV_RANK)
        self.hidden = normal(MAX_BATCH * GAMMA, hidden)
        self.anchors = torch.randint(0, vocab, (MAX_BATCH,), generator=generator, device=device)


class Standard:
    """SGLang's proposal on one GPU."""

    def __init__(self, tensors: Tensors, batch: int, greedy: bool) -> None:
        from sglang.srt.layers.layernorm import RMSNorm
        from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead, MarkovW2ShardGeometry
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

        device = tensors.head.device
        self.tensors, self.batch, self.greedy = tensors, batch, greedy
        self.norm = RMSNorm(HIDDEN, eps=EPS).to(device)
        self.norm.weight.data = tensors.norm
        with torch.device("meta"):
            self.markov_head = DSparkV4MarkovHead(vocab_size=tensors.vocab, markov_rank=MARKOV_RANK, is_dsv41=True)
        # The same look-up as VocabParallelEmbedding of one rank, without a parallel group.
        self.markov_head.markov_w1 = torch.nn.Embedding.from_pretrained(tensors.w1)
        self.markov_head.markov_w2.weight = torch.nn.Parameter(tensors.w2, requires_grad=False)
        # As configure_tp_shard leaves a rank that has the whole vocabulary: the bias stays bf16.
        self.markov_head._tp_shard = MarkovW2ShardGeometry(
            tp_size=1, org_vocab_start=0, org_vocab_end=tensors.vocab, num_embeddings_per_partition=tensors.vocab, num_embeddings_padded=tensors.vocab
        )
        self.noise = DraftNoise(key=KEY, offset=torch.zeros(1, dtype=torch.int64, device=device))
        self.temperatures = torch.full((batch,), 0.0 if greedy else 1.0, device=device)
        self.logits = None if greedy else torch.zeros(batch, GAMMA, tensors.vocab, device=device)
        self.tokens = torch.zeros(batch * GAMMA, dtype=torch.int64, device=device)

    def base_logits(self) -> torch.Tensor:
        return torch.matmul(self.norm.forward_cuda(self.tensors.hidden[: self.batch * GAMMA]), self.tensors.head.T).view(self.batch, GAMMA, -1)

    def block(self, base: torch.Tensor) -> None:
        from sglang.srt.speculative.dspark_components.dspark_draft import draft_markov_block

        tokens, _ = draft_markov_block(
            markov_head=self.markov_head, base_logits=base, anchor_tokens=self.tensors.anchors[: self.batch], draft_hidden=None,
            step_temperatures=self.temperatures, noise=self.noise, tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens),
            logits_out=self.logits, greedy_draft=self.greedy,
        )  # fmt: skip
        self.tokens.copy_(tokens.reshape(-1))

    def launch(self) -> None:
        self.block(self.base_logits())


class Ours:
    """draft_sampler on virtual ranks that share the GPU."""

    def __init__(self, tensors: Tensors, num_ranks: int, batch: int, greedy: bool, walks: str) -> None:
        device = tensors.head.device
        part = tensors.vocab // num_ranks
        self.tensors, self.batch = tensors, batch
        self.temperatures = torch.full((batch,), 0.0 if greedy else 1.0, device=device)

        def shard(begin: int) -> DraftShard:
            own = slice(begin, begin + part)
            return DraftShard(
                begin, tensors.head[own], tensors.w2[own], torch.full((batch * GAMMA,), -7, device=device),
                torch.zeros(1, dtype=torch.int64, device=device), None if greedy else torch.zeros(batch, GAMMA, tensors.vocab, device=device),
            )  # fmt: skip

        self.shards = [shard(rank * part) for rank in range(num_ranks)]
        blocks = torch.cuda.get_device_properties(device).multi_processor_count // num_ranks
        weights = DraftWeights(tensors.w1, tensors.norm, EPS)
        self.sampler = DraftSampler(weights, self.shards, GAMMA, batch, device, blocks, deadline_s=5.0, noise_key=KEY, has_long_walks=walks == "long")

    def launch(self) -> None:
        t, rows = self.tensors, self.batch * GAMMA
        stream = torch.cuda.current_stream().cuda_stream
        self.sampler.launch(self.batch, t.hidden[:rows], t.anchors[: self.batch], self.temperatures, stream)

    def base_logits(self) -> torch.Tensor:
        return torch.cat([self.sampler.base_logits(self.batch, rank) for rank in range(len(self.shards))], -1)


def base_figure(ours: torch.Tensor, standard: torch.Tensor, tensors: Tensors) -> gate.Figure:
    """Of [rows, vocab] base logits, through the numerics gate; the oracle in parts of the vocabulary, so that it fits beside the rest."""
    x = oracle.normed(tensors.hidden[: ours.shape[0]], tensors.norm, EPS)
    wanted = torch.cat([(x @ part.double().T).cpu() for part in tensors.head.split(16384)], -1)
    return gate.figure("base_logits", ours.cpu(), standard.cpu(), wanted)


def block_problems(ours: Ours, standard: Standard) -> list[str]:
    """Every rank's outputs against SGLang's block, which has run behind our base logits from the same noise offset."""
    found = []
    for rank, shard in enumerate(ours.shards):
        if not torch.equal(shard.draft_tokens, standard.tokens):
            found.append(f"tokens of rank {rank} differ in {int((shard.draft_tokens != standard.tokens).sum())} of {standard.tokens.numel()}")
        if shard.step_logits is not None and not torch.equal(shard.step_logits, standard.logits):
            found.append(f"step logits of rank {rank} differ")
        if shard.noise_offset.item() != standard.noise.offset.item():
            found.append(f"noise offset of rank {rank} is {shard.noise_offset.item()}, SGLang's {standard.noise.offset.item()}")
    return found


def measure(ours: Ours, standard: Standard, groups: int, group_ms: float) -> tuple[list[float], list[float], list[str]]:
    """(ms of SGLang's, ms of ours, problems)."""
    ours.launch()
    figure = base_figure(ours.base_logits().flatten(0, 1), standard.base_logits().flatten(0, 1), ours.tensors)
    standard.block(ours.base_logits())
    found = block_problems(ours, standard) + ([] if figure.passed else [str(figure)])
    standard.launch()
    torch.cuda.synchronize()
    graphs = [timing.capture(run) for run in (standard.launch, ours.launch)]
    for shard in ours.shards:
        shard.draft_tokens.fill_(-7)
        shard.noise_offset.copy_(standard.noise.offset)
    graphs[1].replay()
    standard.block(ours.base_logits())
    found += [f"replayed: {problem}" for problem in block_problems(ours, standard)]
    off, on = timing.in_turn([graph.replay for graph in graphs], groups=groups, target_ms=group_ms)
    return off, on, found


def row_of(
    vocab: int, num_ranks: int, batch: int, greedy: bool, walks: str, off_ms: list[float], on_ms: list[float], floor_ms: float, wrong: list[str]
) -> dict:
    """The results row of one case."""
    return {
        "model": "deepseek-v4.1-dspark", "dtype": "bf16", "tp": num_ranks, "mode": "draft-greedy" if greedy else "draft-sampled",
        "kernel": "draft_sampler", "metric": "proposal" if walks == "long" else "proposal, short walks", "batch": batch,
        "rows": batch * GAMMA, "vocab": vocab, "virtual_ranks": num_ranks,
        "floor_ms": round(floor_ms, 6), "off_ms": [round(t, 6) for t in off_ms], "on_ms": [round(t, 6) for t in on_ms], "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """One line a case, times in microseconds."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    case, times = f"{'columns':>8} {'ranks':>5} {'mode':>13} {'batch':>5} {'walks':>5}", f"{'off us':>8} {'on us':>8} {'ratio':>6} {'ci95':>12}"
    lines.append(f"{case} {times} {'floor us':>8} {'share':>6}  problems")
    for row in content["rows"]:
        (low, high), walks = row["ratio_ci95"], "short" if "short" in row["metric"] else "long"
        lines.append(
            f"{row['vocab']:8d} {row['virtual_ranks']:5d} {row['mode']:>13} {row['batch']:5d} {walks:>5} {1e3 * stats.median(row['off_ms']):8.2f}"
            f" {1e3 * stats.median(row['on_ms']):8.2f} {row['ratio']:6.2f} {f'{low:.2f}..{high:.2f}':>12} {1e3 * row['floor_ms']:8.2f}"
            f" {row['on_floor_share']:6.2f}  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = command.parser(__doc__, "kernel-draft-sampler")
    parser.add_argument("--shapes", type=parse_shapes, default=((129280, 1), (32320, 4)), help="VOCABxRANKS, comma list")
    parser.add_argument("--batches", type=numbers(1, MAX_BATCH), default=(1, 2, 4), help="requests")
    parser.add_argument("--walks", type=parse_walks, default=("long",), help="comma list of long and short")
    args = parser.parse_args()
    if command.refused("draft_sampler"):
        return 2
    results = command.begin(args, "draft_sampler", WEIGHTS, table)
    device = command.device()
    read_gb_s = command.measure_bandwidth(results, 4.0)
    with torch.no_grad():
        for vocab, num_ranks in args.shapes:
            tensors = Tensors(vocab, device)
            for greedy in (True, False):
                for batch, walks in itertools.product(args.batches, args.walks):
                    ours, standard = Ours(tensors, num_ranks, batch, greedy, walks), Standard(tensors, batch, greedy)
                    off_ms, on_ms, wrong = measure(ours, standard, args.groups, args.group_ms)
                    floor_ms = floors.floor_ms(floor_bytes(vocab, batch), read_gb_s)
                    row = results.add(**row_of(vocab, num_ranks, batch, greedy, walks, off_ms, on_ms, floor_ms, wrong))
                    what = f"{vocab}x{num_ranks}, {row['mode']}, batch {batch}, {walks} walks"
                    deadline.say(f"{what}: ratio {row['ratio']}; {'; '.join(wrong[:3]) or 'output checked'}")
    return command.end(results, table)


if __name__ == "__main__":
    sys.exit(main())
