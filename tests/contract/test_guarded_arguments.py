"""The guard's table names server arguments that SGLang has, and accepts each one's default."""

from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sgl_lowlatency.guard import config as guard
from sgl_lowlatency.guard import speculation
from sgl_lowlatency.specs.nvidia.dense import QWEN3_SPEC as SPEC

DEFAULTS = {field.name: field.default for field in record_fields(ServerArgs)}


@pytest.mark.parametrize("name", [row[0] for row in guard._SERVER_ARGUMENTS])
def test_the_default_of_a_guarded_argument_is_served(name):
    served = SimpleNamespace(**DEFAULTS)
    assert name in DEFAULTS
    assert not [reason for reason in guard._server_argument_reasons(served) if name.replace("_", "-") in reason]


def test_what_the_guard_reads_of_speculation_exists_and_its_default_is_served():
    assert set(speculation.READ) <= set(DEFAULTS)
    assert speculation.speculation_reasons(SimpleNamespace(**DEFAULTS), max_rows=16) == []


def test_an_argument_this_sglang_lacks_is_a_reason():
    fields = dict(DEFAULTS)
    del fields["kv_canary"]
    (reason,) = guard._server_argument_reasons(SimpleNamespace(**fields))
    assert "no server argument 'kv_canary'" in reason


def test_required_names_exist():
    """SGLang reads them with getattr: a name it lacks would be an AttributeError at every start."""
    assert set(SPEC.requires.server_args) <= set(DEFAULTS)
    assert all(hasattr(envs, name) for name in SPEC.requires.env)
