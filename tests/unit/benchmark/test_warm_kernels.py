"""Which kernels are compiled beside the servers, and that one that fails is named and stops nothing."""

import sys

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import warm_kernels

CONFIG = models.hf_config(models.SHAPES["qwen3-8b"])


def test_the_matrices_are_those_that_sglang_runs():
    assert warm_kernels.matrices(CONFIG) == [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]


def test_an_fp8_model_has_a_process_a_matrix_and_range_of_tokens():
    assert warm_kernels.jobs(CONFIG, [1, 1024]) == [["kernels"]]
    fp8 = models.hf_config(models.SHAPES["qwen3-8b"], fp8=True)
    jobs = warm_kernels.jobs(fp8, [1024, 8, 1, 3, 8192, 8])
    assert jobs[0] == ["kernels"] and len(jobs) == 1 + 3 * 4
    assert jobs[1:4] == [["matrix", "6144", "4096", tokens] for tokens in ("1,3,8", "1024", "8192")]
    assert len(warm_kernels.jobs(fp8, [1, 2])) == 1 + 4, "no process without a number of tokens"


def test_a_kernel_that_fails_is_named_and_the_others_are_built():
    built = []

    def fails():
        raise OSError("no nvcc")

    assert warm_kernels.build({"a": lambda: built.append("a"), "b": fails, "c": lambda: built.append("c")}) == ["b not built: OSError: no nvcc"]
    assert sorted(built) == ["a", "c"]


def test_nothing_compiles_after_the_limit():
    codes = ("raise SystemExit(0)", "raise SystemExit(3)", "import time; time.sleep(60)")
    started = [deadline.spawn([sys.executable, "-c", code]) for code in codes]
    assert warm_kernels.finish(started, limit_s=3.0) == "3 processes, 1 ended late, 1 failed"
    assert all(process.poll() is not None for process in started)
