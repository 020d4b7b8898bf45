"""SGLang's surroundings of a forward, small: a Qwen3- or Qwen3-MoE-shaped module, a KV pool, an attention backend, a ForwardBatch.

`standard` stands for the model's own forward, of decode and of verify: the reference of SGLang's bf16 path, writing KV rows as
SGLang does.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from verify_step import causal, standard_verify

from sgl_lowlatency.kernels.decode_step import DecodeStep, EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.reference import moe_standard_path, moe_step, routing, standard_path
from sgl_lowlatency.reference.inputs import random_weights
from sgl_lowlatency.reference.step import StepInputs
from sgl_lowlatency.runtime.exact_linears import ExactLinear
from sgl_lowlatency.runtime.lm_head import ComputedLogits
from sgl_lowlatency.runtime.sglang_state import KvState, captured_layers

GEOMETRY = Geometry(
    num_layers=2, hidden=128, num_q_heads=4, num_kv_heads=2, head_dim=64, intermediate=128, vocab=256, max_position=1200,
    rms_eps=1e-6, tied_head=False,
)
MOE_GEOMETRY = dataclasses.replace(GEOMETRY, num_experts=32, top_k=4, moe_intermediate=64, norm_topk_prob=True)
MOE_FP8_GEOMETRY = dataclasses.replace(MOE_GEOMETRY, num_q_heads=2, num_kv_heads=1, head_dim=128, moe_intermediate=128)
GRID = 2
SHARED_MEMORY_BYTES = 227 * 1024
# of the spec; tests of the check's verdict must see it judge by what servers are judged by
from sgl_lowlatency.specs.nvidia.dense import TOLERANCES  # noqa: E402


def _holder(weight: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def _linear(tensors: LayerTensors, name: str) -> torch.nn.Module:
    """A linear layer as SGLang holds it after loading: FP8 with a scale a row has its weight transposed and its scales in a column."""
    weight, scale = getattr(tensors, name), getattr(tensors, f"{name}_scale")
    if tensors.format != "fp8_channel":
        module = _holder(weight)
        if scale is not None:
            module.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    else:
        module = _holder(weight.t())
        module.weight_scale = torch.nn.Parameter(scale[:, None], requires_grad=False)
    module.quant_method = "SGLang's own"
    return module


class TinyTopK(torch.nn.Module):
    """SGLang's TopK: the choices of bf16 logits. flips: rows, of every layer, whose last choice is the next best instead, as rounding might."""

    def __init__(self, geometry: Geometry):
        super().__init__()
        self.topk_config, self.flips = SimpleNamespace(top_k=geometry.top_k, renormalize=geometry.norm_topk_prob), ()

    def forward(self, hidden_states, router_logits):
        top_k, renormalizes = self.topk_config.top_k, self.topk_config.renormalize
        choices = routing.choose(router_logits, top_k + 1, False)
        ids, weights = choices.ids, choices.weights
        for row in self.flips:
            ids[row, [top_k - 1, top_k]] = ids[row, [top_k, top_k - 1]]
            weights[row, [top_k - 1, top_k]] = weights[row, [top_k, top_k - 1]]
        ids, weights = ids[:, :top_k], weights[:, :top_k]
        weights = weights / weights.sum(dim=-1, keepdim=True) if renormalizes else weights
        return StandardTopKOutput(weights.float(), ids.int(), router_logits)


class TinyLayer(torch.nn.Module):
    """A decoder layer as the model's loop calls it, up to what its norm reads."""

    def forward(self, positions, hidden_states, forward_batch):
        return residual_batch.stream_of(forward_batch).export(hidden_states)


class TinyProcessor(torch.nn.Module):
    """SGLang's LogitsProcessor: a head with a quant_method gives the product, else it is bf16; fp32 in the batch's buffer if there is one."""

    def forward(self, input_ids, hidden, lm_head, forward_batch, aux_hidden_states):
        method = getattr(lm_head, "quant_method", None)
        logits = hidden @ lm_head.weight.T if method is None else method.apply(lm_head, hidden, None)
        buffer = forward_batch.next_token_logits_buffer
        if buffer is not None and logits is not buffer:
            logits = buffer.copy_(logits)
        return SimpleNamespace(next_token_logits=logits.float(), hidden_states=hidden if aux_hidden_states is None else aux_hidden_states)


class TinyModel(torch.nn.Module):
    """The attributes of Qwen3ForCausalLM, or Qwen3MoeForCausalLM, that the runtime and the build read."""

    def __init__(self, weights: DecodeStepWeights, lm_head: torch.Tensor, geometry: Geometry = GEOMETRY):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens, self.model.norm = _holder(weights.embedding), _holder(weights.final_norm)
        self.model.layers = torch.nn.ModuleList()
        for tensors in weights.layers:
            layer, attention, mlp = TinyLayer(), torch.nn.Module(), torch.nn.Module()
            layer.input_layernorm, layer.post_attention_layernorm = _holder(tensors.input_norm), _holder(tensors.post_norm)
            attention.qkv_proj, attention.o_proj = _linear(tensors, "qkv"), _linear(tensors, "out_proj")
            attention.q_norm, attention.k_norm = _holder(tensors.q_norm), _holder(tensors.k_norm)
            attention.rotary_emb = SimpleNamespace(cos_sin_cache=weights.cos_sin)
            if geometry.is_moe:
                mlp.gate, mlp.topk, mlp.experts = _holder(tensors.router), TinyTopK(geometry), torch.nn.Module()
                for name, ours in (("w13_weight", "gate_up"), ("w2_weight", "down")):
                    setattr(mlp.experts, name, torch.nn.Parameter(getattr(tensors, ours), requires_grad=False))
                    if (scale := getattr(tensors, f"{ours}_scale")) is not None:
                        setattr(mlp.experts, f"{name}_scale_inv", torch.nn.Parameter(scale, requires_grad=False))
            else:
                mlp.gate_up_proj, mlp.down_proj = _linear(tensors, "gate_up"), _linear(tensors, "down")
            layer.self_attn, layer.mlp = attention, mlp
            self.model.layers.append(layer)
        self.lm_head, self.logits_processor = _holder(lm_head), TinyProcessor()
        self.capture_aux_hidden_states, self.model.layers_to_capture = False, []

    def capture(self, layers):
        """As SGLang configures it for drafts that read the inputs of `layers`."""
        self.capture_aux_hidden_states, self.model.layers_to_capture = True, layers


class TinyServing:
    """One model with its pools. page_size and num_slots shape the KV pool. drafts: tokens a request, 1 for plain decode. has_head: the
    kernel has the LM head."""

    def __init__(
        self, page_size: int = 1, num_slots: int = 4096, request_rows: int = 40, context: int = 1100, drafts: int = 1,
        weight_format: str = "bf16", num_layers: int = GEOMETRY.num_layers, has_head: bool = True, geometry: Geometry = GEOMETRY,
        seed: int = 0,
    ):
        g, self.drafts = dataclasses.replace(geometry, num_layers=num_layers), drafts
        self.geometry, self.weights = g, random_weights(g, seed=seed, weight_format=weight_format)
        generator = torch.Generator().manual_seed(1 + seed)
        lm_head = (torch.randn(g.vocab, g.hidden, generator=generator) * 3 * g.hidden**-0.5).bfloat16()
        self.model = TinyModel(self.weights, lm_head, g)
        if has_head:
            self.weights = dataclasses.replace(self.weights, lm_head=self.model.lm_head.weight.detach())
        shape = (num_slots, g.num_kv_heads, g.head_dim)
        k, v = ([torch.randn(shape, generator=generator).bfloat16() for _ in range(g.num_layers)] for _ in range(2))
        table = torch.randint(0, num_slots, (request_rows, context), generator=generator, dtype=torch.int32)
        self.kv = KvState(k=k, v=v, req_to_token=table, page_size=page_size)
        self.planned = []
        pool = SimpleNamespace(get_kv_buffer=lambda layer: (k[layer], v[layer]), page_size=page_size, post_capture_active=False)
        self.backend = SimpleNamespace(
            forward_metadata="of the running forward",
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            kv_index_translator=None,
            init_forward_metadata=self._plan_attention,
        )
        self.view = SimpleNamespace(kv_pool=SimpleNamespace(pool=pool))

    def _plan_attention(self, forward_batch):
        self.planned.append(forward_batch)
        self.backend.forward_metadata = f"of planned batch {len(self.planned)}"

    def plans(self, *widths: int):
        kinds = {"rows_per_request": self.drafts, "element_bytes": self.weights.element_bytes, "has_head": self.weights.lm_head is not None}
        return {rows: make_plan(self.geometry, rows, GRID, SHARED_MEMORY_BYTES, **kinds) for rows in widths}

    def decode_step(self, *widths: int, planted: int = 0):
        options = EmulationOptions(planted=planted)
        return DecodeStep(self.geometry, self.plans(*widths), self.weights, torch.device("cpu"), deadline_s=30.0, emulation=options)

    def batch(self, requests: int) -> ForwardBatch:
        """A batch of `requests` requests as SGLang's capture makes it: everything zero, lengths 1."""
        zeros, ones = torch.zeros(requests * self.drafts, dtype=torch.int64), torch.ones(requests, dtype=torch.int64)
        mode, spec_info = ForwardMode.DECODE, None
        if self.drafts > 1:
            mask = torch.ones(requests * self.drafts * (self.drafts + 1), dtype=torch.bool)
            mode, spec_info = ForwardMode.TARGET_VERIFY, NgramVerifyInput(custom_mask=mask, draft_token_num=self.drafts)
        return ForwardBatch(
            forward_mode=mode, batch_size=requests, input_ids=zeros, req_pool_indices=zeros[:requests], seq_lens=ones,
            out_cache_loc=zeros, seq_lens_sum=requests, positions=zeros, seq_lens_cpu=ones, spec_info=spec_info,
        )

    def _mlp(self):
        """What the references call for the MLPs of a MoE model, with the model's own routers; None of a dense one."""
        if not self.geometry.is_moe:
            return None

        def mlp(layer, normed):
            tensors = moe_step.tensors(self.weights.layers[layer])
            block = self.model.model.layers[layer].mlp
            chosen = block.topk(normed, torch.nn.functional.linear(normed, tensors.router))
            if (stand_in := vars(block.experts).get("forward")) is not None:
                return stand_in(normed, chosen)
            return moe_standard_path.combine(tensors, normed, routing.Choices(chosen.topk_ids.long(), chosen.topk_weights.double()))

        return mlp

    def _enters(self, positions, forward_batch):
        """What the references call before a layer: SGLang's residual stream goes through the model's own layer."""

        def enters(layer, x, residual):
            if residual is None:
                residual_batch.start(forward_batch)
            else:
                _, forward_batch.residual_stream = ResidualStream.from_handoff(x, residual, PLAIN_ADD)
            entering = self.model.model.layers[layer](positions, x, forward_batch)
            residual_batch.clear(forward_batch)
            return entering

        return enters

    def verify(self, sees=causal):
        """The model's own forward of a verify step, optionally with a bug in what a draft token sees (verify_step.causal)."""

        def forward(input_ids, positions, forward_batch):
            fb = forward_batch
            hidden, logits, entered = standard_verify(
                self.geometry, self.weights, self.kv, input_ids, positions, fb.seq_lens, fb.req_pool_indices, fb.out_cache_loc,
                self.model.lm_head.weight, sees, self._mlp(), self._enters(positions, fb),
            )
            states = [entered[layer] for layer in captured_layers(self.model)]
            return SimpleNamespace(next_token_logits=logits, hidden_states=torch.cat(states, dim=-1) if states else hidden)

        return forward

    def standard(self, input_ids, positions, forward_batch):
        """The model's own forward: its linear layers round the activations of FP8 weights, unless others stand in for them."""
        fb = forward_batch
        if fb.forward_mode.is_target_verify():
            return self.verify()(input_ids, positions, fb)
        rounds = not isinstance(getattr(self.model.model.layers[0].self_attn.qkv_proj, "quant_method", None), ExactLinear)
        inputs = StepInputs(
            input_ids, positions, fb.seq_lens, fb.req_pool_indices, fb.out_cache_loc, self.kv.req_to_token, self.kv.k, self.kv.v
        )
        outputs = standard_path.decode_step(
            self.geometry, self.weights, inputs, self.model.lm_head.weight, rounds, captured_layers(self.model), self._mlp(),
            self._enters(positions, fb),
        )
        for layer in range(self.geometry.num_layers):
            self.kv.k[layer][fb.out_cache_loc] = outputs.k_rows[layer]
            self.kv.v[layer][fb.out_cache_loc] = outputs.v_rows[layer]
        states = outputs.hidden if outputs.aux is None else torch.cat(list(outputs.aux), dim=-1)
        return SimpleNamespace(next_token_logits=outputs.logits, hidden_states=states)

    def kernel(self, planted: int = 0, *, rows: int):
        """Our forward: the emulated kernel with its LM head, optionally with a planted bug, and the model's logits processor."""
        step = self.decode_step(rows, planted=planted)
        step.attach_kv(self.kv.k, self.kv.v, self.kv.req_to_token)
        step.capture(captured_layers(self.model))

        def forward(input_ids, positions, forward_batch, **kept):
            fb, hidden = forward_batch, torch.empty((rows, self.geometry.hidden), dtype=torch.bfloat16)
            aux = torch.empty((rows, len(step.captured) * self.geometry.hidden), dtype=torch.bfloat16) if step.captured else None
            prefix = {} if self.drafts == 1 else {"lengths_are_prefix": True}
            logits = torch.empty((rows, self.geometry.vocab))
            step.launch(
                rows, input_ids, positions, fb.seq_lens, fb.req_pool_indices, fb.out_cache_loc, hidden, aux_out=aux, logits=logits, **prefix, **kept
            )
            return self.model.logits_processor(input_ids, hidden, ComputedLogits(self.model.lm_head, hidden, logits), fb, aux)

        return forward
