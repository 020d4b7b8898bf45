"""GPU tests need torch, numpy and pytest, the installed extension with CUDA kernels, and one NVIDIA GPU; no SGLang."""

import pytest
import torch

from sgl_lowlatency import _C


def pytest_collection_modifyitems(items):
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif "cuda" not in _C.backends():
        reason = "the extension was built without CUDA kernels"
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
