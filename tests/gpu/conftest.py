"""GPU tests need torch, numpy and pytest, the installed extension with CUDA kernels, and one NVIDIA GPU; no SGLang. On an AMD GPU, with torch's
ROCm build and the code objects, test_monokernel.py is all that runs."""

import pytest
import torch

from sgl_lowlatency import _C


def pytest_collection_modifyitems(items):
    reason, is_rocm = None, torch.version.hip is not None
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif not is_rocm and "cuda" not in _C.backends():
        reason = "the extension was built without CUDA kernels"
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            is_amds = item.path.name == "test_monokernel.py"
            if reason or (is_rocm and not is_amds):
                item.add_marker(pytest.mark.skip(reason=reason or "needs an NVIDIA GPU"))
