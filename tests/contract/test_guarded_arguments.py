"""The guard's table names server arguments that SGLang has, and accepts each one's default."""

from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sgl_lowlatency.guard import config as guard
from sgl_lowlatency.guard import attention_slices, draft, fused_moe, moe, parallel, speculation
from sgl_lowlatency.specs.nvidia.deepseek_v4 import DEEPSEEK_V4_SPEC
from sgl_lowlatency.specs.nvidia.deepseek_v4 import SERVER_ARGUMENTS as DEEPSEEK_V4_ARGUMENTS
from sgl_lowlatency.specs.nvidia.deepseek_v4_dspark import DEEPSEEK_V4_TARGET_SPEC
from sgl_lowlatency.specs.nvidia.dense import QWEN3_SPEC
from sgl_lowlatency.specs.nvidia.qwen3_moe import QWEN3_MOE_SPEC

DEFAULTS = {field.name: field.default for field in record_fields(ServerArgs)}


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (table, row[0])
        for table in (guard._SERVER_ARGUMENTS, moe.SERVER_ARGUMENTS, parallel.SERVER_ARGUMENTS, fused_moe.SERVER_ARGUMENTS, draft.SERVER_ARGUMENTS,
                      attention_slices.SERVER_ARGUMENTS, DEEPSEEK_V4_ARGUMENTS)
        for row in table
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_default_of_a_guarded_argument_is_served(table, name):
    served = SimpleNamespace(**DEFAULTS)
    assert name in DEFAULTS
    assert not [reason for reason in guard.server_argument_reasons(served, table) if name.replace("_", "-") in reason]


def test_what_the_guard_reads_of_speculation_exists_and_its_default_is_served():
    assert set(speculation.READ) <= set(DEFAULTS)
    assert speculation.speculation_reasons(SimpleNamespace(**DEFAULTS), max_rows=16) == []


def test_an_argument_this_sglang_lacks_is_a_reason():
    fields = dict(DEFAULTS)
    del fields["kv_canary"]
    (reason,) = guard.server_argument_reasons(SimpleNamespace(**fields))
    assert "no server argument 'kv_canary'" in reason


@pytest.mark.parametrize("spec", [QWEN3_SPEC, QWEN3_MOE_SPEC, DEEPSEEK_V4_SPEC, DEEPSEEK_V4_TARGET_SPEC], ids=lambda spec: spec.name)
def test_required_names_exist(spec):
    """SGLang reads them with getattr: a name it lacks would be an AttributeError at every start."""
    assert set(spec.requires.server_args) <= set(DEFAULTS)
    assert all(hasattr(envs, name) for name in spec.requires.env)


def test_the_defaults_of_what_moe_requires_are_served():
    assert DEFAULTS["moe_runner_backend"] in QWEN3_MOE_SPEC.requires.server_args["moe_runner_backend"]
    assert {name: getattr(envs, name).get() for name in moe.ENVIRONMENT} == moe.ENVIRONMENT
