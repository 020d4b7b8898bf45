"""A small DeepSeek-V4.1 on the CPU out of SGLang's own code: its loop over layers, decoder layers, boundaries, mHC and attention, whose constructors
need a GPU and are left out. Stand-ins are what launches on a GPU alone: FP8 linears, mHC's three kernels, rope and the store of keys (all as the
oracles have them, rounded as SGLang rounds), and the attention backend, which has every source of numbers that the real one has.

Layers are those of the model cut to eight: 0 and 1 window attention, Engram in front of 1; 2 and 3 ratio 2, 2 a source of keys and index; 4 to 7
ratio 1, 4 a source of keys, index and candidates, 6 of an index. Drafts read 5, 6 and 7."""

from __future__ import annotations

import contextlib
import types
from types import SimpleNamespace

import attention_in_cases
import attention_out_cases
import torch
from attention_stand_ins import IN, OUT
from moe_stand_ins import DeepseekV2MoE
from sglang.kernels.ops.attention import dsv4 as sglang_dsv4
from sglang.kernels.ops.layernorm import mhc as sglang_mhc_kernels
from sglang.srt.layers.layer_boundary import append_stages, layer_stack
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.models import deepseek_v4 as sglang_model
from sglang.srt.models import deepseek_v4_boundary as hc_boundary
from sglang.srt.models import deepseek_v4_mhc as mhc

from sgl_lowlatency.kernels.attention_in import KvPages
from sgl_lowlatency.reference import attention_in as in_oracle
from sgl_lowlatency.reference import attention_out as out_oracle
from sgl_lowlatency.reference.fused_moe import shared_matrix

HIDDEN, HEADS, HEAD_DIM, PAGE = IN.hidden, IN.heads, 512, 32
RATIOS = (0, 0, 2, 2, 1, 1, 1, 1)
KV_SOURCES, INDEX_SOURCES, ENGRAMS, CAPTURED = (2, 4), (2, 4, 6), (1,), (5, 6, 7)
SOFTMAX_SCALE = HEAD_DIM**-0.5 / 10  # of random queries and keys: no key takes it all
HISTORY, PAGES = 5, 12  # keys of a request in front of a step; of every layer's cache


class Linear(torch.nn.Module):
    """y = x @ W.T of an FP8 matrix, rounded to bf16, as a linear layer of SGLang's is called. has_fp8_activations: x is quantised first, in groups of
    32, as on sm_90: their scales are powers of two, which is the coarsest way."""

    has_fp8_activations = False

    def __init__(self, weight, scale):
        super().__init__()
        self.weight, self.weight_scale_inv, self.bias = weight, scale, None
        self.quant_method, self.deepgemm_mxfp8_input = SimpleNamespace(weight_block_size=[32, 32]), False
        self._matrix = shared_matrix(weight, scale)

    def forward(self, x, skip_all_reduce=False):
        return (fp8_groups(x).flatten(-2) @ self._matrix.T if self.has_fp8_activations else x.double() @ self._matrix.T).bfloat16(), None


def fp8_groups(x):
    """float64 [..., n / 32, 32] of x: what e4m3 keeps of it."""
    groups = x.double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)))
    return (groups / scale).to(torch.float8_e4m3fn).double() * scale


class Norm(torch.nn.Module):
    cast_x_before_out_mul, variance_size_override = False, None

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x):
        return in_oracle.norm(x.double(), self.weight, self.variance_epsilon).bfloat16()


class MQALayer(sglang_model.MQALayer):
    """SGLang's forward on tensors of a random layer."""

    def __init__(self, layer_id, ratio):
        torch.nn.Module.__init__(self)
        first, last = attention_in_cases.random_weights(IN, seed=layer_id), attention_out_cases.random_weights(OUT, seed=layer_id)
        self.layer_id, self.compress_ratio, self.is_dsv41 = layer_id, ratio, True
        self.attn_tp_size, self.use_mega_attention, self.fuse_wqa_wkv, self.q_head_norm, self.wo_a_fp8 = 1, False, True, False, False
        self.use_fused_qk_norm_rope = self.use_fused_wo_a = self.use_npu_arch35_mxfp8_wo_a = False
        self.head_dim, self.qk_rope_head_dim, self.n_heads, self.n_groups = HEAD_DIM, 64, HEADS, OUT.groups
        self.n_local_heads, self.n_local_groups, self.alt_streams = HEADS, OUT.groups, None
        self.q_lora_rank, self.o_lora_rank, self.eps = IN.lora, OUT.lora, first.kv_norm_eps
        self.wqkv_a, self.wq_b = Linear(first.wqkv_a, first.wqkv_a_scale), Linear(first.wq_b, first.wq_b_scale)
        self.wo_a, self.wo_b = SimpleNamespace(weight=last.wo_a), Linear(last.wo_b, last.wo_b_scale)
        self.q_norm, self.kv_norm = Norm(first.q_norm, first.q_norm_eps), Norm(first.kv_norm, first.kv_norm_eps)
        self.register_buffer("freqs_cis", first.freqs_cis)
        self.attn_sink = torch.nn.Parameter(torch.zeros(HEADS), requires_grad=False)
        self.attn_mqa = SimpleNamespace(layer_id=layer_id)
        self.compressor = object() if layer_id in KV_SOURCES else None
        self.indexer = object() if layer_id in INDEX_SOURCES else None

    def maybe_use_decode_attn_tp(self, forward_batch):
        return contextlib.nullcontext()


class DeepseekV4CudaDecoderLayer(sglang_model.DeepseekV4CudaDecoderLayer):
    def __init__(self, layer_id, ratio):
        torch.nn.Module.__init__(self)
        last = attention_out_cases.random_weights(OUT, seed=layer_id)
        ffn = attention_out_cases.random_weights(OUT, seed=100 + layer_id)
        first = attention_in_cases.random_weights(IN, seed=layer_id)
        self.config = SimpleNamespace(model_type="deepseek_v41", hc_pre_from_prev_sublayer=True)
        self.layer_id, self.hc_stats_stream, self.boundary_pre_from_prev, self.boundary_mhc_fusions = layer_id, None, True, True
        self.use_fused_mhc_post_pre = False
        self.self_attn, self.mlp = MQALayer(layer_id, ratio), DeepseekV2MoE(HIDDEN, 128, seed=layer_id)
        for i, bias in enumerate((self.mlp.w.bias, self.mlp.w.bias_alt)):  # scores differ by less: no rounding sends a row to another expert
            bias.copy_(torch.randperm(bias.numel(), generator=torch.Generator().manual_seed(2 * layer_id + i)) * 4.0)
        self.input_layernorm, self.post_attention_layernorm = Norm(first.norm, first.norm_eps), Norm(last.norm, last.norm_eps)
        for name, w in (("attn", last), ("ffn", ffn)):
            for part in ("fn", "scale", "base"):
                tensor = {"fn": w.hyper.mix, "scale": w.hyper.mix_scale, "base": w.hyper.mix_base}[part]
                setattr(self, f"hc_{name}_{part}", torch.nn.Parameter(tensor, requires_grad=False))
        self.hc_cfg = mhc.HcConfig(4, 20, 1e-6, 1e-20, HIDDEN, True, False)
        self.attn_hc = mhc.HcSubLayer(self.hc_cfg, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base, self.input_layernorm)
        self.ffn_hc = mhc.HcSubLayer(self.hc_cfg, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base, self.post_attention_layernorm)
        self.engram = Engram() if layer_id in ENGRAMS else None
        attn, moe = hc_boundary.stages(self.config, layer_id, layer=self)
        self.attn_boundary, self.ffn_boundary = append_stages((attn, self.input_layernorm), (moe, self.post_attention_layernorm))


class Engram(torch.nn.Module):
    """Another residual, from hashes of the tokens."""

    layer_hash_index = 0

    def forward(self, residual, hash_ids, forward_batch, input_ids, cp_all_tokens):
        return (residual.float() + 0.1 * torch.sin(hash_ids.float())[:, None, None]).bfloat16()


class Model(sglang_model.DeepseekV4Model):
    """SGLang's forward from ids to (normed states, streams) and the states that drafts read."""

    def __init__(self, captures=True):
        torch.nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(5)
        self.config = SimpleNamespace(model_type="deepseek_v41")
        self.pp_group = SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
        self.hidden_size, self.hc_mult, self.hc_pre_from_prev_sublayer = HIDDEN, 4, True
        self.embed_tokens = torch.nn.Embedding(128, HIDDEN, _weight=torch.randn(128, HIDDEN, generator=generator).bfloat16())
        self.norm = Norm((1 + torch.randn(HIDDEN, generator=generator) * 0.2).bfloat16(), 1e-6)
        with layer_stack(final_read=hc_boundary.FinalRead()):
            self.layers = torch.nn.ModuleList(DeepseekV4CudaDecoderLayer(i, ratio) for i, ratio in enumerate(RATIOS))
        self.start_layer, self.end_layer, self.late_layer_start, self.decoder_replay_tail = 0, len(RATIOS), None, None
        self.engram_hasher = lambda ids, batch: ids[:, None] * 7 % 31
        self.dspark_layers_to_capture = list(CAPTURED) if captures else None
        self.requires_grad_(False)

    def _can_run_tbo(self, forward_batch):
        return False


class Target(torch.nn.Module):
    """A causal LM without drafts whose logits are each row's normed states."""

    def __init__(self):
        super().__init__()
        self.model = Model(captures=False)

    def forward(self, ids, positions, batch):
        return self.model(ids, positions, batch, None)[0].float()


class Pool:
    """SGLang's pool of window keys in the V4 layout. written: (layer, slots), in order."""

    uniform_fp8, request_window, kv_layout = False, None, SimpleNamespace(value="v4")

    def __init__(self):
        self.pages, self.written = [], []
        for layer in range(len(RATIOS)):
            cache = attention_in_cases.empty_cache("cpu", PAGES, PAGE)
            history = torch.randn(PAGES * PAGE, HEAD_DIM, generator=torch.Generator().manual_seed(40 + layer))
            store_keys(cache, torch.arange(PAGES * PAGE), history.double())
            self.pages.append(cache.pages)

    def get_swa_key_buffer_radix(self, layer_id):
        return self.pages[layer_id].view(torch.float8_e4m3fn)

    def get_swa_key_page_size(self):
        return PAGE

    def translate_loc_from_full_to_swa(self, slots):
        return slots

    def set_swa_key_buffer_radix_fused_norm_rope(self, layer_id, swa_loc, kv, kv_weight, eps, freqs_cis, positions):
        fused_k_norm_rope_flashmla(kv, kv_weight, eps, freqs_cis, positions, swa_loc, self.pages[layer_id], PAGE, "v4")


class Backend:
    """A sparse attention over a request's window, and of layers with a ratio over what the newest source left: keys of x, weighed by an index of
    q_lora. `called`: what was asked, in order; a commit that was put off is over once slots have been asked for."""

    forward_metadata = None

    def __init__(self):
        self.token_to_kv_pool, self.called, self.keys, self.index, self.is_committed = Pool(), [], None, None, False
        self.maps = [torch.randn(width, HEAD_DIM, generator=torch.Generator().manual_seed(60 + width)) * width**-0.5 for width in (HIDDEN, IN.lora)]

    def get_swa_out_cache_loc(self, forward_batch):
        self.is_committed = True
        return forward_batch.slots

    def forward_low_ratio_sources(self, *, layer, x, q_lora, positions, forward_batch):
        self.called.append(("sources", layer.layer_id))
        if layer.compressor is not None:
            self.keys = (x.float() @ self.maps[0] + positions[:, None] * 1e-3).double()
        if layer.indexer is not None:
            self.index = torch.sigmoid((q_lora.float() @ self.maps[1]).mean(1)).double()

    def forward(self, q, k, v, layer, forward_batch, compress_ratio, attn_sink, save_kv_cache):
        assert k is v and not save_kv_cache and attn_sink.shape == (HEADS,)
        assert self.is_committed, "keys were stored beside a commit that was put off"
        self.is_committed = False
        self.called.append(("attention", layer.layer_id))
        cache, out = KvPages(self.token_to_kv_pool.pages[layer.layer_id], PAGE), []
        for row in range(q.shape[0]):
            request, draft = divmod(row, forward_batch.tokens)
            own = forward_batch.slots[request * forward_batch.tokens : request * forward_batch.tokens + draft + 1].long()
            keys = in_oracle.read_slots(cache, torch.cat((forward_batch.history[request], own)))
            if compress_ratio:
                keys = torch.cat((keys, (self.keys * self.index[:, None])[row : row + 1]))
            logits = torch.cat((q[row].double() @ keys.T * SOFTMAX_SCALE, attn_sink.double()[:, None]), 1)
            out.append(logits.softmax(1)[:, :-1] @ keys)
        return torch.stack(out).bfloat16()


def store_keys(cache, slots, rows):
    """rows float64 [n, 512], which the V4 layout keeps as in_oracle.stored has them."""
    for slot, row in zip(slots.tolist(), rows, strict=True):
        page, at = cache.pages[slot // cache.page_size], slot % cache.page_size
        groups = row[:448].unflatten(0, (7, 64))
        exponent = torch.ceil(torch.log2(groups.abs().amax(1).clamp(min=in_oracle.LEAST) / in_oracle.LARGEST))
        data = page[at * 576 : (at + 1) * 576]
        data[:448] = (groups / torch.exp2(exponent)[:, None]).flatten().to(torch.float8_e4m3fn).view(torch.uint8)
        data[448:] = row[448:].bfloat16().view(torch.uint8)
        page[cache.page_size * 576 + at * 8 :][:7] = (exponent + 127).to(torch.uint8)


def fused_k_norm_rope_flashmla(kv, kv_weight, eps, freqs_cis, positions, out_loc, kvcache, page_size, layout="v4"):
    rows = in_oracle.rotate(in_oracle.norm(kv.double(), kv_weight, eps), freqs_cis, positions)
    store_keys(KvPages(kvcache, page_size), out_loc, rows)


def fused_rope_inplace(q, k, freqs_cis, positions, inverse=False):
    wide = torch.nn.functional.pad(q, (HEAD_DIM - 64, 0))
    turned = (out_oracle.rotate_back if inverse else in_oracle.rotate)(wide, freqs_cis, positions)
    q.copy_(turned[..., -64:].bfloat16())


def mhc_combine(x_flat, pre, hc, out_dtype):
    return torch.einsum("tk,tkh->th", pre.double(), x_flat.double().unflatten(1, (hc, -1))).to(out_dtype)


def hc_split_sinkhorn(mixes, scale, base, mult, iterations, eps):
    m = mixes.double().squeeze(1)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + eps
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = (m[:, 8:] * scale[2] + base[8:]).unflatten(1, (4, 4)).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre.float()[:, None], post.float()[:, None], comb.float()[:, None]


def mhc_post(x, residual, post_mix, comb):
    mixed = torch.einsum("tji,tjh->tih", comb.double(), residual.double())
    return (post_mix.double()[:, :, None] * x.double()[:, None] + mixed).bfloat16()


@contextlib.contextmanager
def one_gpu():
    """SGLang's configuration in the body: a server's of one rank."""
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs

    served = ServerArgs(model_path="dummy", device="cpu")
    with use_context(create_context(served, role="scheduler", ranks=SpawnRanks(world_rank=0))):
        yield


def install(monkeypatch):
    """SGLang's launches become the stand-ins above, its modules take this machine for one with CUDA."""
    from sglang.srt.environ import envs

    monkeypatch.setattr(sglang_model, "_is_cuda", True)
    monkeypatch.setattr(sglang_model, "fused_rope_inplace", fused_rope_inplace)
    monkeypatch.setattr(sglang_dsv4, "fused_k_norm_rope_flashmla", fused_k_norm_rope_flashmla)
    for function in (mhc_combine, hc_split_sinkhorn, mhc_post):
        monkeypatch.setattr(sglang_mhc_kernels, function.__name__, function)
    monkeypatch.setenv("SGLANG_OPT_USE_FLASHINFER_MHC", "0")
    assert envs.SGLANG_OPT_USE_TILELANG_MHC_POST.get()


def batch_of(requests, tokens=1, seed=0):
    """(input ids, positions, forward batch) of a decode step, or with several tokens a request of a verify step."""
    generator = torch.Generator().manual_seed(900 + seed)
    rows = requests * tokens
    free = torch.randperm(PAGES * PAGE, generator=generator)
    ids = torch.randint(0, 128, (rows,), generator=generator)
    ids[rows // 2] = 77  # which the MoE ranks by another bias
    positions = (torch.randint(5, 60, (requests,), generator=generator)[:, None] + torch.arange(tokens)).flatten()
    spec_info = None if tokens == 1 else SimpleNamespace(
        is_verify_input=lambda: True, ragged_verify_layout=None, draft_token_num=tokens, topk=1
    )
    long = torch.arange(requests)
    batch = types.SimpleNamespace(
        forward_mode=ForwardMode.DECODE if tokens == 1 else ForwardMode.TARGET_VERIFY, batch_size=requests, input_ids=ids, positions=positions,
        seq_lens=long + 6, req_pool_indices=long + 1, out_cache_loc=free[:rows], slots=free[:rows].int(), tokens=tokens,
        history=free[rows:].reshape(-1)[: requests * HISTORY].view(requests, HISTORY), spec_info=spec_info, residual_stream=None,
        input_embeds=None, replace_embeds=None, lora_ids=None, tbo_children=None, attn_cp_metadata=None, num_token_non_padded=None,
        global_num_token_non_padded_cpu=None, capture_hidden_mode=CaptureHiddenMode.FULL, is_extend_in_batch=False, encoder_swa_replay=False,
        is_prefill_only=False, dp_padding_mode=None, can_run_tbo=False, return_logprob=False,
    )  # fmt: skip
    return ids, positions, batch
