from pathlib import Path

import pytest


@pytest.fixture
def repo_root() -> Path:
    """The checkout, which also has what is not installed: csrc, setup.py."""
    return Path(__file__).resolve().parents[2]
