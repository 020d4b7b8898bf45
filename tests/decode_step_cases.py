"""Cases, runs and checks of `decode_step` that the emulated tests and the GPU tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from sgl_lowlatency.kernels.decode_step import DecodeStep, DecodeStepWeights, EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import MATRICES, RoutingRecord
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.validate import validate
from sgl_lowlatency.reference import dense_decode, standard_path
from sgl_lowlatency.reference.gate import GateReport, compare
from sgl_lowlatency.reference.step import StepInputs, StepOutputs, read_kv_rows

ROWS = (1, 2, 3, 5, 8, 16, 32)
CONTEXTS = (1, 63, 64, 65, 1000, 8000)
MIXED = (  # lengths that meet item, page and tile edges beside one another
    [1, 64, 65],
    [1000, 1, 63, 64, 65],
    [17, 1, 128, 129, 1000, 63, 2, 64],
    [65, 1, 300, 64, 2, 63, 100, 31, 32, 33, 15, 16, 17, 1, 127, 128],
    [16, 17, 1, 1000, 64, 65, 2, 63, 128, 129, 15, 300, 31, 33, 100, 127, 700],
)


VERIFY_PREFIXES = (0, 1, 15, 16, 17, 63, 64, 65, 1000)  # new tokens begin, straddle or fill a run of 16, alone or behind old ones
VERIFY_ROWS_PER_REQUEST = (2, 3, 4, 5, 8)


def verify_batches(rows_per_request: int, max_rows: int = 16) -> list[list[int]]:
    """Prefixes of full steps: every one of VERIFY_PREFIXES, the first again where the last step has room."""
    num_requests = max_rows // rows_per_request
    num_batches = -(-len(VERIFY_PREFIXES) // num_requests)
    turn = [*VERIFY_PREFIXES, *VERIFY_PREFIXES]
    return [turn[i * num_requests : (i + 1) * num_requests] for i in range(num_batches)]


class Runner:
    """A DecodeStep with its plans, launched on copies of the inputs with every output poisoned first.

    refused: take plans that the validator refuses, and no others. rows_per_request: of a plan by its rows; 1 where it says nothing.
    captured: layers whose inputs are outputs too.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: DecodeStepWeights,
        rows: tuple[int, ...],
        grid: int,
        shared_memory_bytes: int = 232448,
        panel_budget_bytes: int = 64 * 1024,
        deadline_s: float = 5.0,
        emulation: EmulationOptions | None = None,
        refused: bool = False,
        rows_per_request: dict[int, int] | None = None,
        captured: Sequence[int] = (),
    ):
        self.geometry, self.weights = geometry, weights
        self.device = weights.embedding.device
        chains = rows_per_request or {}
        self.plans = {
            r: make_plan(
                geometry, r, grid, shared_memory_bytes, panel_budget_bytes, chains.get(r, 1), weights.element_bytes, weights.lm_head is not None
            )
            for r in rows
        }
        for plan in self.plans.values():
            assert bool(validate(plan)) == refused, validate(plan)
        self.kernel = DecodeStep(geometry, self.plans, weights, self.device, deadline_s, emulation=emulation)
        self.kernel.capture(captured)

    def attach(self, inputs: StepInputs) -> None:
        self.kernel.attach_kv(inputs.k_buffers, inputs.v_buffers, inputs.req_to_token)

    def launch(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        aux: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        routing: RoutingRecord | None = None,
    ) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        self.kernel.launch(
            inputs.rows, inputs.input_ids, inputs.positions, inputs.seq_lens, inputs.req_pool_indices, inputs.out_cache_loc,
            hidden, stream=stream, lengths_are_prefix=inputs.lengths_are_prefix, aux_out=aux, logits=logits, routing=routing,
        )

    def run(self, inputs: StepInputs, with_logits: bool = True, routing: RoutingRecord | None = None) -> StepOutputs:
        """One step on a copy, with logits where the weights have an LM head, its routing kept in `routing`; checks that of the KV pool only the new tokens' rows changed."""
        used = inputs.clone()
        self.attach(used)
        hidden, aux, logits = self.poisoned_outputs(inputs.rows, with_logits)
        self.launch(used, hidden, aux, logits, routing)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        assert_pool_untouched(inputs, used)
        return self.outputs(used, hidden, aux, logits)

    def poisoned_outputs(
        self, rows: int, with_logits: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """hidden [rows, hidden]; where layers are captured, aux [rows, layers * hidden]; where the weights have an LM head, logits [rows, vocab];
        all NaN."""
        num = len(self.kernel.captured)

        def poisoned(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows, width), float("nan"), dtype=dtype, device=self.device)

        hidden = poisoned(self.geometry.hidden, torch.bfloat16)
        aux = poisoned(num * self.geometry.hidden, torch.bfloat16) if num else None
        has_logits = with_logits and self.weights.lm_head is not None
        return hidden, aux, poisoned(self.geometry.vocab, torch.float32) if has_logits else None

    def outputs(self, used: StepInputs, hidden: torch.Tensor, aux: torch.Tensor | None, logits: torch.Tensor | None) -> StepOutputs:
        """What a launch on `used` left, aux by layer."""
        layers = None if aux is None else aux.view(used.rows, -1, self.geometry.hidden).transpose(0, 1)
        return StepOutputs(hidden, *read_kv_rows(used), logits, layers)


def with_subnormal_codes(weights: DecodeStepWeights, seed: int) -> DecodeStepWeights:
    """FP8 weights whose codes are all subnormal, k 2^-9 with |k| below 8, under scales that make up for it."""
    generator = torch.Generator(weights.embedding.device).manual_seed(seed)
    layers = []
    for layer in weights.layers:
        fields = {}
        for name in MATRICES:
            matrix, scale = getattr(layer, name), getattr(layer, f"{name}_scale")
            codes = torch.randint(0, 16, matrix.shape, generator=generator, device=matrix.device, dtype=torch.uint8)
            fields[name] = (codes % 8 + codes // 8 * 128).view(torch.float8_e4m3fn)
            rms = 17.5**0.5 * 2.0**-9  # of the codes' values
            fields[f"{name}_scale"] = torch.full_like(scale, matrix.shape[1] ** -0.5 / rms)
        layers.append(dataclasses.replace(layer, **fields))
    return dataclasses.replace(weights, layers=layers)


def lose_tile(runner: Runner, rows: int, op: int) -> None:
    """Takes tile 0 of an operation (abi::OpIdx) from its owner: the step of `rows` rows waits for words that nobody writes."""
    ranges = runner.kernel._tile_tables[rows].view(torch.int32).view(runner.plans[rows].grid, -1, 2)[:, op]
    owner = next(block for block, (begin, count) in enumerate(ranges.tolist()) if begin == 0 and count > 0)
    ranges[owner] += torch.tensor([1, -1], dtype=torch.int32, device=ranges.device)


def assert_pool_untouched(before: StepInputs, after: StepInputs) -> None:
    """Bitwise, every KV row but those at out_cache_loc, NaN included."""
    num_slots = before.k_buffers[0].shape[0]
    others = torch.ones(num_slots, dtype=torch.bool, device=before.out_cache_loc.device)
    others[before.out_cache_loc] = False
    for kind in ("k_buffers", "v_buffers"):
        for layer, (old, new) in enumerate(zip(getattr(before, kind), getattr(after, kind), strict=True)):
            assert torch.equal(old.view(torch.int16)[others], new.view(torch.int16)[others]), f"{kind}[{layer}]: a foreign KV row changed"


def gate(
    geometry: Geometry, weights: DecodeStepWeights, steps: list[StepInputs], ours: list[StepOutputs], rows: int | None = None,
    captured: Sequence[int] = (),
) -> GateReport:
    """Our outputs against the float64 oracle, with SGLang's bf16 rounding as the measure; the rows of all steps together.

    Of FP8 weights the measure leaves SGLang's rounding of activations to FP8 out: ours are bf16. rows: compare only the first rows of each step.
    captured: the layers whose inputs ours have.
    """
    lm_head = None if weights.lm_head is None else weights.lm_head[: geometry.vocab]
    arms = [
        ours,
        [standard_path.decode_step(geometry, weights, step, lm_head, rounds_activations=False, captured=captured) for step in steps],
        [dense_decode.decode_step(geometry, weights, step, torch.float64, lm_head, captured=captured) for step in steps],
    ]
    return compare(*(in_units_of_scales(geometry, weights, join([first_rows(outputs, rows) for outputs in arm])) for arm in arms))


def in_units_of_scales(geometry: Geometry, weights: DecodeStepWeights, outputs: StepOutputs) -> StepOutputs:
    """V rows of weights with a scale a row, each channel over its own: float64. The largest difference of all is one of the loudest channel
    otherwise, of as many elements as there are rows, and large by luck in a path as good as the measure."""
    if weights.layers[0].format != "fp8_channel":
        return outputs
    heads = geometry.num_kv_heads, geometry.head_dim
    scales = torch.stack([layer.qkv_scale[-heads[0] * heads[1] :].view(heads) for layer in weights.layers])
    return dataclasses.replace(outputs, v_rows=outputs.v_rows.double() / scales[:, None].double())


def first_rows(outputs: StepOutputs, rows: int | None) -> StepOutputs:
    logits = None if outputs.logits is None else outputs.logits[:rows]
    aux = None if outputs.aux is None else outputs.aux[:, :rows]
    return StepOutputs(outputs.hidden[:rows], outputs.k_rows[:, :rows], outputs.v_rows[:, :rows], logits, aux)


def join(outputs: list[StepOutputs]) -> StepOutputs:
    logits = None if outputs[0].logits is None else torch.cat([o.logits for o in outputs])
    aux = None if outputs[0].aux is None else torch.cat([o.aux for o in outputs], 1)
    return StepOutputs(
        torch.cat([o.hidden for o in outputs]), torch.cat([o.k_rows for o in outputs], 1), torch.cat([o.v_rows for o in outputs], 1), logits, aux
    )


def same_bits(a: StepOutputs, b: StepOutputs) -> bool:
    """Whether two outputs are bitwise equal: aux too, which both have or neither, and logits where both have them."""
    assert (a.aux is None) == (b.aux is None)
    names = ["hidden", "k_rows", "v_rows"] + ["logits"] * (a.logits is not None and b.logits is not None) + ["aux"] * (a.aux is not None)
    return all(torch.equal(getattr(a, name).view(torch.int16), getattr(b, name).view(torch.int16)) for name in names)
