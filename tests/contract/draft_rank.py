"""The ranks of test_draft_ranks.py, a process each: DeepSeek-V4.1's draft with its part of the LM head, proposals over workspaces that the processes
really share. Every rank runs every scenario and leaves what came of each in FOLDER/RANK.json.

    python draft_rank.py NUM_RANKS FOLDER DEVICE

DEVICE is cpu, or cuda: ranks share the GPUs there are, in turns of the driver where several have one. The processes part once SGLang's models are
imported, which takes longer than all scenarios.
"""

import datetime
import json
import multiprocessing
import sys
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepseek_draft import GAMMA, draft_model, inputs
from sglang.srt.speculative.dspark_components import dspark_draft_sampler
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

from sgl_lowlatency.build.agreement import DisagreementError
from sgl_lowlatency.build.draft import deepseek_v4_parts, draft_ranks
from sgl_lowlatency.guard.draft import deepseek_v4_reasons, most_requests
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import DraftSamplerFault, describe_draft_fault
from sgl_lowlatency.runtime.draft_sampler import DraftProposal
from sgl_lowlatency.runtime.sglang_state import TensorParallel

VOCAB, KEY, MAX_BS, GRID, DEADLINE_S = 1000, 99, 3, 2, 20.0
KEPT_LATENTS = 32  # dialect::Planted
TEMPERATURES = torch.tensor([0.7, 0.0, 1.5])


def device_of(rank):
    return torch.device("cuda", rank % torch.cuda.device_count()) if sys.argv[3] == "cuda" else torch.device("cpu")


class Gather:
    """VocabGather of processes over gloo."""

    def __init__(self, group):
        self._group = group

    def _gather(self, local, dim):
        own = local.cpu().contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts, dim).to(local.device)

    def gather_stacked(self, local):
        return self._gather(local, 0)

    def __call__(self, local):
        return self._gather(local, 1)


class Rank:
    """A rank's draft, and SGLang's sampler of it."""

    def __init__(self, rank, size, group):
        self.place, self.gather = TensorParallel(rank, size, group), Gather(group)
        self.device = device_of(rank)
        self.model = draft_model(types.SimpleNamespace(setattr=setattr), VOCAB, rank, size, self.gather).to(self.device)

    def proposal(self, reasons=(), planted=0, deadline_s=DEADLINE_S, change=None):
        ranks = draft_ranks("Tiny", self.place, self.device, deadline_s)
        if change:
            exchange = ranks.exchange
            ranks = types.SimpleNamespace(**vars(ranks) | {"exchange": lambda claim: exchange(change(claim))})
        reasons_of = lambda model: [*reasons, *deepseek_v4_reasons(model, self.place.num_ranks)]  # noqa: E731
        options = EmulationOptions(planted=planted)
        return DraftProposal(self.model, deadline_s, GRID, reasons_of, deepseek_v4_parts, most_requests, ranks, options)

    def sampler(self, greedy, proposal=None, gamma=GAMMA):
        return dspark_draft_sampler.DsparkDraftSampler(
            model=self.model, gamma=gamma, max_bs=MAX_BS, device=self.device,
            noise=DraftNoise(key=KEY, offset=torch.zeros(1, dtype=torch.int64, device=self.device)),
            tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), greedy_draft=greedy,
            megakernel_sampler=None if proposal is None else proposal.draft_sampler,
        )  # fmt: skip


def run(sampler, hidden, ids):
    batch = hidden.shape[0] // GAMMA
    sampler.params.step_temperatures[:batch] = TEMPERATURES[:batch].to(sampler.out.device)
    with torch.no_grad():
        sampler(hidden.to(sampler.out.device), ids.to(sampler.out.device))
    return sampler.out[: batch * GAMMA].tolist()


def propose(greedy):
    def scenario(rank, size, group):
        """Launches of changing batches; a rank that comes late to one of them is waited for."""
        one = Rank(rank, size, group)
        ours, standard = one.sampler(greedy, one.proposal()), one.sampler(greedy)
        tokens, wanted, same_logits = [], [], []
        for launch, batch in enumerate((3, 1, 2, 3)):
            given = inputs(batch, VOCAB, launch)
            if rank == launch % size:
                time.sleep(0.2)
            tokens.append(run(ours, *given))
            wanted.append(run(standard, *given))
            if not greedy:
                samples = TEMPERATURES[:batch] != 0
                same_logits.append(torch.equal(ours.step_logits[:batch][samples], standard.step_logits[:batch][samples]))
                same_logits.append(not ours.step_logits[:batch][~samples].any())
            dist.barrier(group)  # what collectives of the draft's layers do in a server: nobody stores into step logits that another one reads
        return {"tokens": tokens, "wanted": wanted, "same logits": same_logits, "offset": ours._noise.offset.item()}

    return scenario


def keeps(rank, size, group):
    """The last rank's draft is not the kernel's."""
    one = Rank(rank, size, group)
    sampler = one.sampler(False, one.proposal(["the Markov head is another"] if rank == size - 1 else []))
    return {"served": [bs for bs in range(1, MAX_BS + 1) if sampler._megakernel_steps(bs) is not None]}


def planted(rank, size, group):
    """The last rank's kernel keeps the anchors' latents for all steps."""
    one = Rank(rank, size, group)
    one.sampler(False, one.proposal(planted=KEPT_LATENTS if rank == size - 1 else 0))


def other_copies(rank, size, group):
    """The last rank tells of other step logits than it was sent."""
    one = Rank(rank, size, group)
    change = lambda claim: claim | ({"step logits": 5} if rank == size - 1 and "step logits" in claim else {})  # noqa: E731
    one.sampler(False, one.proposal(change=change))


def other_gamma(rank, size, group):
    one = Rank(rank, size, group)
    one.sampler(False, one.proposal(), gamma=GAMMA - 1 if rank == size - 1 else GAMMA)


def dead(rank, size, group):
    """The last rank ends behind the self-check and one launch."""
    one = Rank(rank, size, group)
    proposal = one.proposal(deadline_s=2.0)
    sampler = one.sampler(False, proposal)
    run(sampler, *inputs(2, VOCAB, 0))
    if rank == size - 1:
        return {"absent": True}
    try:
        run(sampler, *inputs(2, VOCAB, 1))
    except RuntimeError:  # on a GPU all that torch knows is that the launch failed
        raise DraftSamplerFault(describe_draft_fault(proposal.sampler.fault())) from None


SCENARIOS = {
    "sampled": propose(False), "greedy": propose(True), "keeps": keeps, "planted": planted, "other copies": other_copies, "other gamma": other_gamma,
    "dead": dead,
}  # fmt: skip


def run_rank(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    if device_of(rank).type == "cuda":
        torch.cuda.set_device(device_of(rank))
    groups = {name: dist.new_group(backend="gloo") for name in SCENARIOS}
    results = {}
    for name, scenario in SCENARIOS.items():
        dist.barrier()
        try:
            results[name] = scenario(rank, size, groups[name]) or {}
        except (DisagreementError, DraftSamplerFault, RuntimeError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


def main():
    size, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    if sys.argv[3] == "cuda":
        del SCENARIOS["planted"]  # host emulation alone has planted bugs
    dspark_draft_sampler.megakernel_agree = lambda served, what, group: None
    dspark_draft_sampler.get_dp_tp_group = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: False
    ranks = [multiprocessing.get_context("fork").Process(target=run_rank, args=(rank, size, folder)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    main()
