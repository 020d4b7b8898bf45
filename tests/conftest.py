"""Options of the tests."""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--epilogue-schedules",
        type=int,
        default=10_000,
        help="adversarial schedules of test_epilogue_multicast.py in all; 10 000 take about two minutes",
    )


@pytest.fixture
def epilogue_schedules(request):
    return request.config.getoption("--epilogue-schedules")
