"""Options of the tests."""

import collections
import os

import pytest

MANY_CASES = 8


def pytest_configure(config):
    """Processes side by side have a thread each: torch's would wait for processors that the others' keep busy. Before any of them imports torch, and
    for the processes that they start."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config, items):
    """--every-second-case: what else would run stays as it is."""
    if not config.getoption("--every-second-case"):
        return
    cases, left_out = collections.defaultdict(list), []
    for item in items:
        if "/tests/emulation/" in item.path.as_posix():
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        left_out += of_test[1::2] if len(of_test) >= MANY_CASES else []
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]


def pytest_addoption(parser):
    parser.addoption("--all-drafts", action="store_true", help="serve every algorithm of test_draft_servers.py, not one: 5 min; of test_parallel_drafts.py, too, not two")
    parser.addoption(
        "--epilogue-schedules",
        type=int,
        default=10_000,
        help="adversarial schedules of test_epilogue_multicast.py in all; 10 000 take about two minutes",
    )
    parser.addoption("--amd-servers", action="store_true", help="serve a MoE and a faulty model with k1 and k2 too, and a dense one's verify steps: 3 min")
    parser.addoption("--draft-blocks", type=int, default=1500, help="random blocks of test_draft_blocks.py in all; 100 000 take minutes")
    parser.addoption("--draft-ranks", action="store_true", help="test_draft_ranks.py with four processes beside two: a minute more")
    parser.addoption("--parallel-servers", action="store_true", help="serve dense, MoE and faulty models and two kinds of drafts on two ranks: 10 min")
    parser.addoption(
        "--every-second-case", action="store_true", help=f"of emulated tests with {MANY_CASES} cases and more: about half of the time, for a slow machine"
    )
    parser.addoption("--parallel-schedules", type=int, default=180, help="adversarial schedules of test_parallel_step.py in all; 180 take 10 s")


@pytest.fixture
def parallel_schedules(request):
    return request.config.getoption("--parallel-schedules")


@pytest.fixture
def epilogue_schedules(request):
    return request.config.getoption("--epilogue-schedules")
