"""SGLang's draft sampler with and without the plugin's proposal, on a dense DSpark draft: tokens, step logits, noise, and what keeps its own.

The draft has SGLang's own classes and no layers. The LM head gives hidden states that pick one of its columns, and the Markov weights have few bits:
no order of adding matters, and the comparison is of bits.
"""

import types

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from sglang.srt.models import dspark  # noqa: E402
from sglang.srt.speculative.dspark_components import dspark_draft_sampler  # noqa: E402
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise  # noqa: E402

from sgl_lowlatency.build.draft import dense_parts  # noqa: E402
from sgl_lowlatency.guard.draft import dense_reasons, most_requests  # noqa: E402
from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402
from sgl_lowlatency.reference import draft_sampler as oracle  # noqa: E402
from sgl_lowlatency.runtime.draft_sampler import DraftProposal  # noqa: E402

VOCAB, HIDDEN, GAMMA, KEY = 600, 64, 4, 99


class Head(torch.nn.Module):
    """What the draft reads of ParallelLMHead."""

    tp_size, org_vocab_size = 1, VOCAB

    def __init__(self):
        super().__init__()
        padded = torch.full((640, HIDDEN), float("nan"))
        padded[:VOCAB] = torch.randn(VOCAB, HIDDEN)
        self.weight = torch.nn.Parameter(padded.bfloat16(), requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()


@pytest.fixture
def model(monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(dspark, "tensor_model_parallel_all_gather", lambda logits, dim: logits)
    monkeypatch.setattr(dspark_draft_sampler, "megakernel_agree", lambda served, what, group: None)
    monkeypatch.setattr(dspark_draft_sampler, "get_dp_tp_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    draft = dspark.Qwen3DSparkModel.__new__(dspark.Qwen3DSparkModel)
    torch.nn.Module.__init__(draft)
    draft.markov_head = dspark.VanillaMarkov(vocab_size=VOCAB, markov_rank=256).bfloat16()
    for weight in (draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight):
        weight.data = torch.randn(VOCAB, 256).mul(4).round().clamp(-8, 8).div(16).bfloat16()
    draft.lm_head, draft.confidence_head = Head(), None
    draft.sample_from_anchor, draft.logits_mup_width_multiplier, draft._base_logits_gatherer = True, None, None
    return draft


def proposal_of(model, planted=0):
    return DraftProposal(model, 0.5, 3, dense_reasons, dense_parts, most_requests, emulation=EmulationOptions(planted=planted))


def sampler_of(model, greedy, proposal=None, max_bs=3):
    with torch.no_grad():
        return dspark_draft_sampler.DsparkDraftSampler(
            model=model, gamma=GAMMA, max_bs=max_bs, device="cpu", noise=DraftNoise(key=KEY, offset=torch.zeros(1, dtype=torch.int64)),
            tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), greedy_draft=greedy,
            megakernel_sampler=None if proposal is None else proposal.draft_sampler,
        )  # fmt: skip


def inputs(batch, seed):
    """(hidden_states, input_ids) as the draft's forward leaves and gets them: gamma rows a request, the first one's id is the anchor."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.eye(HIDDEN)[torch.randperm(HIDDEN, generator=generator)[: batch * GAMMA]].bfloat16()
    return hidden, torch.randint(0, VOCAB, (batch * GAMMA,), generator=generator)


def run(sampler, hidden, input_ids):
    batch = hidden.shape[0] // GAMMA
    sampler.params.step_temperatures[:batch] = torch.tensor([0.7, 0.0, 1.5])[:batch]
    with torch.no_grad():
        sampler(hidden, input_ids)
    return sampler.out[: batch * GAMMA].view(batch, GAMMA)


@pytest.mark.parametrize("greedy", [False, True])
def test_the_same_tokens_as_without_the_plugin(model, greedy):
    ours, standard = sampler_of(model, greedy, proposal_of(model)), sampler_of(model, greedy)
    assert ours._noise.offset.item() == 0, "the self-check leaves the noise as it was"
    for launch, batch in enumerate((2, 3, 2, 3)):
        given = inputs(batch, launch)
        assert torch.equal(run(ours, *given), run(standard, *given)), launch
        if not greedy:
            samples = ours.params.step_temperatures[:batch] != 0
            assert torch.equal(ours.step_logits[:batch][samples], standard.step_logits[:batch][samples])
        assert ours._noise.offset.item() == standard._noise.offset.item() == (0 if greedy else launch + 1)


def test_a_request_alone(model):
    """Greedy, SGLang's GPU kernel keeps fp32 sums, as the oracle without rounding; on the CPU SGLang rounds them."""
    ours = sampler_of(model, True, proposal_of(model))
    hidden, ids = inputs(1, 5)
    base = torch.matmul(hidden, model.lm_head.weight[:VOCAB].T)[None]
    w1, w2 = model.markov_head.markov_w1.weight.data, model.markov_head.markov_w2.weight.data
    assert torch.equal(run(ours, hidden, ids), oracle.propose(base, ids[:1], w1, w2, torch.zeros(1), rounds_bias=False).tokens)
    sampled, standard = sampler_of(model, False, proposal_of(model)), sampler_of(model, False)
    assert torch.equal(run(sampled, hidden, ids), run(standard, hidden, ids))


def test_requests_beyond_the_kernels_keep_sglangs_proposal(model):
    proposal = proposal_of(model)
    sampler = sampler_of(model, True, proposal, max_bs=18)
    assert [bs for bs in range(1, 19) if sampler._megakernel_steps(bs) is not None] == list(range(1, 17))
    assert proposal.sampler.max_batch == 16
    assert [most_requests(gamma, 18) for gamma in (1, 5, 7, 16, 17, 0)] == [16, 16, 11, 5, 0, 0]


def gated(model):
    model.markov_head = dspark.GatedMarkovHead(vocab_size=VOCAB, markov_rank=256, hidden_size=HIDDEN)


def change_rank(model):
    model.markov_head = dspark.VanillaMarkov(vocab_size=VOCAB, markov_rank=128).bfloat16()


def set_on(path, value):
    def change(model):
        *parents, name = path.split(".")
        for parent in parents:
            model = getattr(model, parent)
        setattr(model, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (gated, "the Markov head is sglang.srt.models.dspark.GatedMarkovHead, not sglang.srt.models.dspark.VanillaMarkov"),
        (change_rank, "markov_w1.weight has shape [600, 128], not [600, 256]"),
        (set_on("logits_mup_width_multiplier", 2.0), "logits are divided by 2.0"),
        (set_on("lm_head", None), "the draft has no LM head yet"),
        (set_on("lm_head.tp_size", 2), "lm_head is shared by 2 GPUs, the model by 1"),
        (set_on("lm_head.quant_method", object()), "lm_head runs object"),
        (set_on("lm_head.org_vocab_size", 512), "lm_head has a vocabulary of 512, the Markov head one of 600"),
        (set_on("lm_head.set_lora", print), "lm_head has LoRA adapters"),
        (lambda model: model.markov_head.float(), "markov_w1.weight is float32, not bfloat16"),
    ],
)
def test_a_draft_that_the_kernel_does_not_know_keeps_sglangs_proposal(model, change, reason, caplog):
    assert dense_reasons(model) == []
    change(model)
    assert reason in dense_reasons(model)
    proposal = proposal_of(model)
    with caplog.at_level("INFO"):
        buffers = dict.fromkeys(("noise", "draft_tokens", "step_logits", "step_temperatures"))
        steps = proposal.draft_sampler(gamma=GAMMA, max_bs=3, greedy_draft=True, **buffers)
    assert [steps(bs) for bs in range(1, 4)] == [None] * 3 and proposal.sampler is None
    assert f"the draft keeps SGLang's proposal:\n  - {reason}" in caplog.text


STALE_NOISE, NOISE_OF_NEXT_ROW, DROPPED_UNIT, KEPT_LATENTS = 27, 28, 29, 32  # dialect::Planted


@pytest.mark.parametrize(
    ("planted", "greedy", "message"),
    [
        (STALE_NOISE, False, r"request \d drew token \d+, SGLang draws \d+ from the same logits"),
        (NOISE_OF_NEXT_ROW, False, r"request \d drew token \d+, SGLang draws \d+ from the same logits"),
        (DROPPED_UNIT, False, r"request \d drew token \d+, SGLang draws \d+ from the same logits"),
        (KEPT_LATENTS, False, r"step 1: step logits: row \d is [\d.]+ of SGLang's away \(relative L2\), bound 0.01"),
        (KEPT_LATENTS, True, r"step \d: the token of request \d is [\d.]+ below the largest logit"),
    ],
)
def test_the_self_check_refuses_planted_bugs(model, planted, greedy, message):
    with pytest.raises(RuntimeError, match=r"draft_sampler self-check failed, the server is refused:\n  - \d requests: ") as raised:
        sampler_of(model, greedy, proposal_of(model, planted), max_bs=8)
    assert raised.match(message)


def test_the_self_check_finds_another_lm_head(model):
    """Weights that SGLang reads elsewhere than the kernel does."""
    model.compute_base_logits = lambda hidden: (torch.matmul(hidden, model.lm_head.weight[:VOCAB].T.roll(1, 1)), hidden)
    with pytest.raises(RuntimeError, match=r"base logits: row \d+ is 1\.\d+ of SGLang's away \(relative L2\), bound 0.01"):
        sampler_of(model, False, proposal_of(model))
