"""Refusals after load, on stand-ins with a Qwen3 model's attributes; each defect planted in one place."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sgl_lowlatency.guard.family import QWEN3
from sgl_lowlatency.guard.model import model_disable_reasons  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 128, 4, 2, 64, 192, 320, 3

HF_CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INTERMEDIATE,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
)


class UnquantizedLinearMethod:
    pass


class RMSNorm(torch.nn.Module):
    variance_epsilon = 1e-6
    variance_size_override = None

    def __init__(self, channels):
        super().__init__()
        self.weight = torch.ones(channels, dtype=torch.bfloat16)


class Linear(torch.nn.Module):
    bias = None

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = torch.zeros(rows, columns, dtype=torch.bfloat16)
        self.quant_method = UnquantizedLinearMethod()


class RotaryEmbedding(torch.nn.Module):
    is_neox_style, rotary_dim = True, HEAD_DIM

    def __init__(self):
        super().__init__()
        self.cos_sin_cache = torch.zeros(64, HEAD_DIM)


class Attention(torch.nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.qkv_proj = Linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.o_proj = Linear(HIDDEN, HEADS * HEAD_DIM)
        self.q_norm, self.k_norm, self.rotary_emb = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM), rope
        self.attn = SimpleNamespace(
            tp_q_head_num=HEADS,
            tp_k_head_num=KV_HEADS,
            tp_v_head_num=KV_HEADS,
            v_head_dim=HEAD_DIM,
            logit_cap=0.0,
            sliding_window_size=-1,
            k_scale=None,
            v_scale=None,
        )


class Layer(torch.nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.self_attn = Attention(rope)
        self.mlp = torch.nn.Module()
        self.mlp.gate_up_proj = Linear(2 * INTERMEDIATE, HIDDEN)
        self.mlp.down_proj = Linear(HIDDEN, INTERMEDIATE)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rope = RotaryEmbedding()
        self.embed_tokens = Linear(VOCAB + 64, HIDDEN)  # SGLang pads the vocabulary
        self.layers = torch.nn.ModuleList(Layer(rope) for _ in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)


@pytest.fixture
def model():
    class Qwen3ForCausalLM(torch.nn.Module):
        __module__ = "sglang.srt.models.qwen3"
        __qualname__ = "Qwen3ForCausalLM"

        def __init__(self):
            super().__init__()
            self.model = Decoder()

    return Qwen3ForCausalLM()


def test_the_expected_model_has_no_reason(model):
    assert model_disable_reasons(model, HF_CONFIG, QWEN3) == []


def test_another_class_is_named():
    (reason,) = model_disable_reasons(Decoder(), HF_CONFIG, QWEN3)
    assert reason.endswith("Decoder, not sglang.srt.models.qwen3.Qwen3ForCausalLM")


def set_fp8(layer):
    layer.mlp.down_proj.weight = layer.mlp.down_proj.weight.to(torch.float8_e4m3fn)


def set_transposed(layer):
    layer.self_attn.o_proj.weight = torch.zeros(HEADS * HEAD_DIM, HIDDEN, dtype=torch.bfloat16).T


def set_misaligned(layer):
    layer.self_attn.q_norm.weight = torch.ones(HEAD_DIM + 1, dtype=torch.bfloat16)[1:]


def set_bias(layer):
    layer.self_attn.qkv_proj.bias = torch.zeros(1)


def set_method(layer):
    layer.mlp.gate_up_proj.quant_method = object()


def set_amx(layer):
    layer.mlp.gate_up_proj.use_intel_amx_backend = True


def set_shape(layer):
    layer.self_attn.k_norm.weight = torch.ones(HIDDEN, dtype=torch.bfloat16)


def set_epsilon(layer):
    layer.input_layernorm.variance_epsilon = 1e-5


def set_interleaved_rope(layer):
    layer.self_attn.rotary_emb.is_neox_style = False


def set_half_rope(layer):
    layer.self_attn.rotary_emb.rotary_dim = HEAD_DIM // 2


def set_tensor_parallel(layer):
    layer.self_attn.attn.tp_q_head_num = HEADS // 2


def set_window(layer):
    layer.self_attn.attn.sliding_window_size = 512


def set_logit_cap(layer):
    layer.self_attn.attn.logit_cap = 30.0


def set_kv_scale(layer):
    layer.self_attn.attn.k_scale = 1.0


DEFECTS = {
    set_fp8: "layer 1: down_proj.weight is float8_e4m3fn, not bfloat16",
    set_transposed: "layer 1: o_proj.weight is not contiguous",
    set_misaligned: "layer 1: q_norm.weight is not aligned to 16 bytes",
    set_bias: "layer 1: qkv_proj has a bias",
    set_method: "layer 1: gate_up_proj runs object, not UnquantizedLinearMethod",
    set_amx: "layer 1: gate_up_proj.weight is packed for Intel AMX",
    set_shape: "layer 1: k_norm.weight has shape [128], not [64]",
    set_epsilon: "layer 1: input_layernorm.variance_epsilon 1e-05 is not config.rms_norm_eps 1e-06",
    set_interleaved_rope: "layer 0: rotary_emb interleaves even and odd channels; the kernel rotates halves (neox)"
    " (and 2 more layers)",
    set_half_rope: "layer 0: rotary_emb rotates 32 of 64 channels (and 2 more layers)",
    set_tensor_parallel: "layer 1: attention heads (q, k, v, value channels) (2, 2, 2, 64) are not the config's: "
    "a tensor-parallel part of them?",
    set_window: "layer 1: attention has a sliding window of 512 tokens",
    set_logit_cap: "layer 1: attention caps its logits at 30.0",
    set_kv_scale: "layer 1: attention scales its K or V",
}


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_one_defect_in_layer_1_is_one_reason(model, plant):
    plant(model.model.layers[1])
    assert model_disable_reasons(model, HF_CONFIG, QWEN3) == [DEFECTS[plant]]


def test_the_same_defect_of_all_layers_is_one_reason(model):
    for layer in model.model.layers:
        set_bias(layer)
    assert model_disable_reasons(model, HF_CONFIG, QWEN3) == ["layer 0: qkv_proj has a bias (and 2 more layers)"]


def test_defects_add_up(model):
    set_bias(model.model.layers[0])
    set_window(model.model.layers[2])
    model.model.embed_tokens.weight = model.model.embed_tokens.weight.half()
    assert len(model_disable_reasons(model, HF_CONFIG, QWEN3)) == 3


def test_two_cos_sin_tables(model):
    model.model.layers[2].self_attn.rotary_emb = RotaryEmbedding()
    (reason,) = model_disable_reasons(model, HF_CONFIG, QWEN3)
    assert reason == "the layers have 2 rotary embeddings; the kernel reads one cos/sin table"


def test_a_forward_hook_inside_the_decoder(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    (reason,) = model_disable_reasons(model, HF_CONFIG, QWEN3)
    assert reason.startswith("forward hooks are registered on 1 modules (layers.1.mlp, ...)")


def test_missing_layers(model):
    del model.model.layers[2]
    assert model_disable_reasons(model, HF_CONFIG, QWEN3) == ["2 layers are loaded, config.num_hidden_layers is 3"]
