"""DeepSeek-V4.1's draft: SGLang's draft sampler with and without the plugin's proposal, on one rank, and SGLang's sharded steps against virtual
ranks.

Oracles: DsparkDraftSampler and draft_markov_block with SGLang's own DSparkV4MarkovHead, of several ranks in threads that gather from each other.
"""

import threading
import types

import pytest
import torch

pytest.importorskip("sglang")
from deepseek_draft import GAMMA, HIDDEN, Head, draft_model, inputs  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.models import deepseek_v4_dspark  # noqa: E402
from sglang.srt.models.dspark import VanillaMarkov  # noqa: E402
from sglang.srt.speculative.dspark_components import dspark_draft_sampler  # noqa: E402
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block  # noqa: E402

from sgl_lowlatency import config  # noqa: E402
from sgl_lowlatency.build.draft import deepseek_v4_parts  # noqa: E402
from sgl_lowlatency.guard.draft import deepseek_v4_reasons, most_requests  # noqa: E402
from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402
from sgl_lowlatency.kernels.draft_sampler import DraftSampler, DraftShard  # noqa: E402
from sgl_lowlatency.runtime.draft_sampler import DraftProposal  # noqa: E402

VOCAB, KEY = 1000, 99
TEMPERATURES = torch.tensor([0.7, 0.0, 1.5, 1e-5, 2.0, 0.0, 1.0, 0.3])


class ThreadGather:
    """VocabGather of ranks that are threads of this process."""

    def __init__(self, num_ranks):
        self._barrier, self._parts = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks
        self.rank = threading.local()

    def _gather(self, local, dim):
        self._parts[self.rank.value] = local
        self._barrier.wait()
        whole = torch.cat(self._parts, dim)
        self._barrier.wait()
        return whole

    def gather_stacked(self, local):
        return self._gather(local, 0)

    def __call__(self, local):
        return self._gather(local, 1)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(dspark_draft_sampler, "megakernel_agree", lambda served, what, group: None)
    monkeypatch.setattr(dspark_draft_sampler, "get_dp_tp_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(deepseek_v4_dspark, "gather_and_crop_vocab", lambda logits, head: logits[..., : head.org_vocab_size])
    return monkeypatch


def proposal_of(model, planted=0):
    return DraftProposal(model, 0.5, 3, deepseek_v4_reasons, deepseek_v4_parts, most_requests, emulation=EmulationOptions(planted=planted))


def sampler_of(model, greedy, proposal=None, max_bs=8):
    return dspark_draft_sampler.DsparkDraftSampler(
        model=model, gamma=GAMMA, max_bs=max_bs, device="cpu", noise=DraftNoise(key=KEY, offset=torch.zeros(1, dtype=torch.int64)),
        tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), greedy_draft=greedy,
        megakernel_sampler=None if proposal is None else proposal.draft_sampler,
    )  # fmt: skip


def run(sampler, hidden, ids):
    batch = hidden.shape[0] // GAMMA
    sampler.params.step_temperatures[:batch] = TEMPERATURES[:batch]
    with torch.no_grad():
        sampler(hidden, ids)
    return sampler.out[: batch * GAMMA].view(batch, GAMMA).clone()


@pytest.mark.parametrize("vocab", [VOCAB, 1024])
@pytest.mark.parametrize("greedy", [False, True])
def test_the_same_tokens_as_without_the_plugin(on_cpu, greedy, vocab):
    """Of a vocabulary that SGLang pads, and one that it does not. A greedy request alone is rounded as ever: SGLang fuses no step of this draft."""
    model = draft_model(on_cpu, vocab)
    if vocab % 64:  # SGLang gathers padded base logits even of one rank
        gather = ThreadGather(1)
        gather.rank.value = 0
        model = draft_model(on_cpu, vocab, gather=gather)
        assert model.markov_head.vocab_shard is not None
    ours, standard = sampler_of(model, greedy, proposal_of(model)), sampler_of(model, greedy)
    assert ours._noise.offset.item() == 0, "the self-check leaves the noise as it was"
    seen = set()
    for launch, batch in enumerate((3, 1, 8, 2)):
        given = inputs(batch, vocab, launch)
        tokens = run(ours, *given)
        assert torch.equal(tokens, run(standard, *given)), launch
        seen |= set(tokens.flatten().tolist())
        if not greedy:
            samples = TEMPERATURES[:batch] != 0
            assert torch.equal(ours.step_logits[:batch][samples], standard.step_logits[:batch][samples])
            assert not ours.step_logits[:batch][~samples].any()
        assert ours._noise.offset.item() == standard._noise.offset.item() == (0 if greedy else launch + 1)
    assert len(seen) > 20, "rows that all draw one token would prove nothing"


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("greedy", [False, True])
def test_virtual_ranks_against_sglangs_sharded_steps(on_cpu, greedy, num_ranks):
    """1000 token ids are padded to 1024: the last of eight ranks has 104 of its 128."""
    gather, batch, offset = ThreadGather(num_ranks), 8, 7
    models = [draft_model(on_cpu, VOCAB, rank, num_ranks, gather) for rank in range(num_ranks)]
    assert [deepseek_v4_reasons(model, num_ranks) for model in models] == [[]] * num_ranks
    (hidden, ids), found = inputs(batch, VOCAB, num_ranks), [None] * num_ranks
    anchors = ids.view(batch, GAMMA)[:, 0]

    def propose(rank):
        gather.rank.value = rank
        with torch.no_grad():
            found[rank] = draft_markov_block(
                markov_head=models[rank].markov_head, base_logits=models[rank].compute_base_logits(hidden)[0].view(batch, GAMMA, -1),
                anchor_tokens=anchors, draft_hidden=None, step_temperatures=TEMPERATURES, noise=DraftNoise(key=KEY, offset=torch.tensor([offset])),
                tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), greedy_draft=greedy,
                logits_out=None if greedy else torch.zeros(batch, GAMMA, VOCAB),
            )  # fmt: skip

    threads = [threading.Thread(target=propose, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts = [deepseek_v4_parts(model) for model in models]
    shards = [
        DraftShard(one.first_token, one.head, one.markov_w2, torch.full((batch * GAMMA,), -1), torch.tensor([offset]),
                   None if greedy else torch.zeros(batch, GAMMA, VOCAB))
        for one in parts
    ]  # fmt: skip
    sampler = DraftSampler(parts[0].weights, shards, GAMMA, batch, torch.device("cpu"), 2, 0.5, parts[0].step_dtype, KEY)
    sampler.launch(batch, hidden, anchors, TEMPERATURES)
    for (tokens, logits), shard in zip(found, shards, strict=True):
        assert torch.equal(shard.draft_tokens.view(batch, GAMMA), tokens)
        if not greedy:
            samples = TEMPERATURES != 0
            assert torch.equal(shard.step_logits[samples], logits[samples])


def test_rows_of_zeros_are_normed_to_zeros(on_cpu):
    """eps is 1e-20: its root is a float all the same."""
    model = draft_model(on_cpu, 1024)
    ours, standard = sampler_of(model, False, proposal_of(model)), sampler_of(model, False)
    hidden, ids = inputs(2, 1024, 3)
    hidden[::2] = 0
    assert torch.equal(run(ours, hidden, ids), run(standard, hidden, ids))
    assert torch.equal(ours.step_logits[0], standard.step_logits[0])


def test_sixteen_requests_are_served_and_no_more(on_cpu):
    model = draft_model(on_cpu, 1024)
    proposal = proposal_of(model)
    sampler = sampler_of(model, True, proposal, max_bs=18)
    assert [bs for bs in range(1, 19) if sampler._megakernel_steps(bs) is not None] == list(range(1, 17))


SKIPPED_NORM, KEPT_LATENTS, STALE_NOISE = 6, 32, 27  # dialect::Planted


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (SKIPPED_NORM, r"base logits: row \d+ is [\d.]+ of SGLang's away \(relative L2\), bound 0.01"),
        (KEPT_LATENTS, r"step 1: step logits: row \d is [\d.]+ of SGLang's away"),
        (STALE_NOISE, r"request \d drew token \d+, SGLang draws \d+ from the same logits"),
    ],
)
def test_the_self_check_refuses_planted_bugs(on_cpu, planted, message):
    model = draft_model(on_cpu, 1024)
    with pytest.raises(RuntimeError, match=message):
        sampler_of(model, False, proposal_of(model, planted))


def fp32_markov(model):
    model.markov_head.markov_w2.weight.data = model.markov_head.markov_w2.weight.data.float()


def vanilla(model):
    model.markov_head = VanillaMarkov(vocab_size=1024, markov_rank=256).bfloat16()


def unshared(model):
    model.lm_head = None


def set_on(name, value):
    return lambda model: setattr(model, name, value)


def set_on_norm(name, value):
    return lambda model: setattr(model.stages[-1].norm, name, value)


def layer_norm(model):
    model.stages[-1].norm = torch.nn.LayerNorm(HIDDEN)


@pytest.mark.parametrize(
    ("change", "num_ranks", "reason"),
    [
        (vanilla, 1, "the Markov head is sglang.srt.models.dspark.VanillaMarkov, not sglang.srt.models.deepseek_v4_dspark.DSparkV4MarkovHead"),
        (fp32_markov, 1, "markov_w2.weight is float32, not bfloat16"),
        (unshared, 1, "the draft has no LM head yet"),
        (set_on("hc_pre_from_prev_sublayer", False), 1, "hidden states leave the draft as 4 streams, which its head mixes: DeepSeek-V4, not V4.1"),
        (set_on("_use_fp32_lm_head", True), 1, "SGLANG_DSPARK_FP32_LM_HEAD asks for float32 base logits"),
        (set_on_norm("cast_x_before_out_mul", True), 1, "the last stage's norm rounds before it multiplies by its weight"),
        (set_on_norm("variance_size_override", 32), 1, "the last stage's norm takes the variance of 32 columns"),
        (layer_norm, 1, "the last stage's norm is LayerNorm, not RMSNorm"),
        (lambda model: None, 2, "lm_head is shared by 1 GPUs, the model by 2"),
    ],
)
def test_a_draft_that_the_kernel_does_not_know_keeps_sglangs_proposal(on_cpu, change, num_ranks, reason):
    model = draft_model(on_cpu, 1024)
    assert deepseek_v4_reasons(model) == []
    change(model)
    assert reason in deepseek_v4_reasons(model, num_ranks)


@pytest.mark.parametrize(
    ("vocab", "rank", "num_ranks", "change", "reason"),
    [
        (1000, 0, 3, None, "3 GPUs are not one of 1, 2, 4, 8"),
        (130, 7, 8, None, "the rank has token ids 130..129, which do not begin at a multiple of 4, are an odd number or none"),
        (1000, 0, 2, ("use_attn_tp_group", True), "lm_head is split over the attention group"),
        (1000, 0, 2, ("weight", torch.zeros(100, HIDDEN, dtype=torch.bfloat16)), "lm_head.weight has 100 rows for 512 token ids"),
    ],
)
def test_splits_that_the_kernel_does_not_have_are_named(on_cpu, vocab, rank, num_ranks, change, reason):
    model = draft_model(on_cpu, 1024)
    model.markov_head = deepseek_v4_dspark.DSparkV4MarkovHead(vocab_size=vocab, markov_rank=256) if vocab != 1024 else model.markov_head
    model.lm_head = Head(torch.zeros(vocab, HIDDEN, dtype=torch.bfloat16), rank, num_ranks)
    if change:
        model.lm_head.__dict__[change[0]] = change[1]
        model.lm_head._parameters.pop(change[0], None)
    assert reason in deepseek_v4_reasons(model, num_ranks)


@pytest.fixture
def switch(monkeypatch):
    def set_to(value):
        monkeypatch.setenv("SGL_LOWLATENCY_DRAFT_SAMPLER", value)
        monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "1")
        config.get.cache_clear()

    yield set_to
    config.get.cache_clear()


NOTHING_ELSE = "whose proposals are all that there is of DeepSeek-V4 with SGL_LOWLATENCY_DEEPSEEK_SLICES=none"


def test_a_target_is_served_for_its_drafts_proposals_alone(switch, monkeypatch):
    from sglang.srt.kernel_plugins.nvidia import binding

    from sgl_lowlatency.specs.nvidia.deepseek_v4_dspark import DEEPSEEK_V4_TARGET_SPEC as spec

    monkeypatch.setattr(binding, "device_isa", lambda: "sm_90")
    reasons = spec.config_disable_reasons
    dspark, plain = Arguments(speculative_algorithm="DSPARK", tp_size=1), Arguments(speculative_algorithm=None, tp_size=1)
    switch("1")
    assert reasons(dspark, V41) == []
    assert reasons(plain, V41) == [f"speculative_algorithm None is not 'DSPARK', {NOTHING_ELSE}"]
    switch("0")
    assert reasons(dspark, V41) == [
        "SGL_LOWLATENCY_DRAFT_SAMPLER is not 1: a draft's proposals are draft_sampler's on request alone, "
        "and SGL_LOWLATENCY_DEEPSEEK_SLICES is none: nothing would be ours"
    ]
    built = spec.build(None, None, None)
    assert (spec.max_rows, built.widths, built.draft_sampler, built.plan(None, None)) == (0, (), None, None)


FULL_GRAPHS = types.SimpleNamespace(decode=types.SimpleNamespace(backend="full"))


@pytest.fixture
def sglangs_binding(switch, monkeypatch):
    """SGLang's binding as in a worker of one rank on sm_90, the plugin registered, its kernels emulated."""
    from sglang.kernels.plugin_kernels.nvidia import spec
    from sglang.srt.kernel_plugins.nvidia import binding

    from sgl_lowlatency import plugin
    from sgl_lowlatency.runtime import sglang_state

    monkeypatch.setattr(spec, "_REGISTRY", {})  # of a process that is started in that environment
    switch("1")
    monkeypatch.setenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", "none")
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "0")  # registering must not replace the device of this process
    config.get.cache_clear()
    plugin.register_nvidia()
    switch("1")
    monkeypatch.setattr(binding, "device_isa", lambda: "sm_90")
    monkeypatch.setattr(binding, "megakernel_enabled", lambda: True)
    monkeypatch.setattr(binding, "_gather_tp", lambda value, group=None: [value])
    monkeypatch.setattr(binding, "_gather_reasons", lambda reasons: reasons)
    monkeypatch.setattr(binding, "_tokens_per_request", lambda: 6)
    monkeypatch.setattr(binding, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    monkeypatch.setattr(binding, "get_exec", lambda: types.SimpleNamespace(graph=types.SimpleNamespace(cuda_graph_config=FULL_GRAPHS)))
    monkeypatch.setattr(binding, "get_device", lambda: types.SimpleNamespace(watchdog_timeout=300))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(sglang_state, "tensor_parallel", lambda: sglang_state.TensorParallel(0, 1, None))
    return binding


V41 = types.SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], hc_pre_from_prev_sublayer=True)


class Arguments:
    """Resolved server arguments; those that nobody named are off."""

    def __init__(self, graphs="full", **given):
        named = {"pp_size": 1, "nnodes": 1, "watchdog_timeout": 300, "disaggregation_mode": "null", "startup_weight_load_mode": "serial", "device": "cpu"}
        self.__dict__.update({**named, **given})
        self.cuda_graph_config = types.SimpleNamespace(decode=types.SimpleNamespace(backend=graphs))

    def __getattr__(self, name):
        return None


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"speculative_algorithm": "DSPARK"}, []),
        ({"speculative_algorithm": "DSPARK", "tp_size": 8}, []),
        ({"speculative_algorithm": "DSPARK", "tp_size": 3}, ["tp_size 3 is not one of ['1', '2', '4', '8']"]),
        ({"speculative_algorithm": "EAGLE"}, [f"speculative_algorithm 'EAGLE' is not 'DSPARK', {NOTHING_ELSE}"]),
        ({"speculative_algorithm": "DSPARK", "graphs": "disabled"}, ["decode CUDA graphs 'disabled' is not one of ['full']"]),
        (
            {"speculative_algorithm": "DSPARK", "enable_pdmux": True, "dp_size": 2, "device": "cuda"},
            [
                "--dp-size 2 is not served: servers that share their requests have not been tested",
                "--enable-pdmux True is not served: decode then has a part of the SMs, and the kernel needs one block on each",
                "--device 'cuda' is not 'cpu': SGL_LOWLATENCY_EMULATE=1 runs the kernels on the CPU",
            ],
        ),
        (
            {"speculative_algorithm": "DSPARK", "enable_lora": True},
            ["LoRA is in use and sgl_lowlatency (DeepSeek-V4.1, its draft's proposals alone) does not accept it"],
        ),
    ],
)  # fmt: skip
def test_sglang_accepts_the_target_or_names_why_not(sglangs_binding, changes, reasons):
    spec, found = sglangs_binding.megakernel_disable_reasons(cfg=Arguments(**{"tp_size": 1, **changes}), hf_config=V41, isa="sm_90")
    assert spec.max_rows == 0 and found == reasons


def test_deepseek_v4_and_switches_without_proposals_of_ours_are_refused(sglangs_binding, monkeypatch):
    v4 = types.SimpleNamespace(architectures=["DeepseekV4ForCausalLM"])
    with envs.SGLANG_DSPARK_FOLDED_PROPOSAL.override(False):
        _, found = sglangs_binding.megakernel_disable_reasons(cfg=Arguments(tp_size=1, speculative_algorithm="DSPARK"), hf_config=v4, isa="sm_90")
    assert len(found) == 2 and any("SGLANG_DSPARK_FOLDED_PROPOSAL" in reason for reason in found)
    assert "config.hc_pre_from_prev_sublayer is not true: a draft of DeepSeek-V4, not V4.1, whose head mixes several streams" in found


def test_what_sglang_installs_proposes_sglangs_tokens(sglangs_binding, on_cpu):
    """Target and draft through SGLang's own installation; the draft's sampler is the one that its draft sampler then takes."""
    target = torch.nn.Linear(1, 1)
    sglangs_binding.install_megakernel(
        model=target, hf_config=types.SimpleNamespace(architectures=["DeepseekV4ForCausalLM"]), capture_tail_hooks=[], is_draft=False
    )
    assert sglangs_binding.megakernel_draft_sampler(target) is None and "forward" not in target.__dict__
    model = draft_model(on_cpu, 1024)
    sglangs_binding.install_megakernel(
        model=model, hf_config=types.SimpleNamespace(architectures=["DeepseekV4ForCausalLMDSpark"]), capture_tail_hooks=[], is_draft=True
    )
    factory = sglangs_binding.megakernel_draft_sampler(model)
    ours, standard = sampler_of(model, False, types.SimpleNamespace(draft_sampler=factory)), sampler_of(model, False)
    assert sglangs_binding.built_megakernel(model).sampler.max_batch == 8
    given = inputs(5, 1024, 9)
    assert torch.equal(run(ours, *given), run(standard, *given))
