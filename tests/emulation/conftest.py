"""Emulated steps are small and the scheduler is one thread: more torch threads than one cost time and give none."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
