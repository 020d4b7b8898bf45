"""What benchmark/kernels/sglang_runner.py relies on in SGLang's decode graphs and one-batch benchmark."""

import inspect

import pytest

pytest.importorskip("sglang")

from sglang.benchmark import one_batch  # noqa: E402
from sglang.srt.compilation.torch_compile_decoration import patch_model  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend  # noqa: E402


def test_a_capture_captures_the_forward_that_the_model_has_then():
    class Model:
        def forward(self):
            return "logits"

    model = Model()
    model.forward = lambda: "hidden"
    with patch_model(model, False, num_tokens=1, tp_group=None) as forward:
        assert forward() == "hidden"


def test_the_full_backend_keeps_graphs_and_outputs_by_key():
    source = inspect.getsource(FullCudaGraphBackend)
    assert "self._graphs[shape_key] = graph" in source and "self._outputs[shape_key] = out" in source
    assert "self._graphs[shape_key].replay()" in source


def test_a_replay_names_its_graph_and_its_size():
    source = inspect.getsource(DecodeCudaGraphRunner)
    assert "self.backend.replay(self._replay_graph_key, forward_batch)" in source
    load = inspect.getsource(DecodeCudaGraphRunner.load_batch)
    assert "self._replay_graph_key = self._make_graph_key(" in load and "self.bs = bs" in load
    assert list(inspect.signature(DecodeCudaGraphRunner.capture).parameters) == ["self"]


def test_one_batch_prefills_requests():
    assert list(inspect.signature(one_batch.extend).parameters) == ["reqs", "model_runner"]
    (request,) = one_batch.prepare_synthetic_inputs_for_latency_test(1, 3, [[7, 8, 9]])
    assert list(request.origin_input_ids) == [7, 8, 9] and callable(one_batch._init_process_global_configs)
