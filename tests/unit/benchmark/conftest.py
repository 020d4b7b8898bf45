"""The benchmark scripts are run from the repository's root and are not installed: put the root on the path, and this folder for what its
tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).parent))  # replay_runs.py
