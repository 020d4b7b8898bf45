"""The environment parser: oracle is the documented meaning of each variable."""

import pytest

from sgl_lowlatency import config


def test_defaults():
    assert config.parse({"PATH": "/bin"}) == config.Config(
        self_check=True, emulate=False, log_coverage_s=0.0, cuda_archs=None, draft_sampler=False,
        deepseek_slices=("attention_in", "attention_out", "moe"), planted=0,
    )


def test_every_variable():
    environ = {
        "SGL_LOWLATENCY_SELF_CHECK": "0",
        "SGL_LOWLATENCY_EMULATE": "1",
        "SGL_LOWLATENCY_LOG_COVERAGE_S": "2.5",
        "SGL_LOWLATENCY_CUDA_ARCHS": "sm_100a, sm_90a",
        "SGL_LOWLATENCY_DRAFT_SAMPLER": "1",
        "SGL_LOWLATENCY_DEEPSEEK_SLICES": "moe, attention_in",
        "SGL_LOWLATENCY_PLANTED": "3",
    }
    assert set(environ) == set(config.NAMES)
    assert config.parse(environ) == config.Config(
        self_check=False, emulate=True, log_coverage_s=2.5, cuda_archs=("sm_90a", "sm_100a"), draft_sampler=True,
        deepseek_slices=("attention_in", "moe"), planted=3,
    )


def test_no_slices():
    assert config.parse({"SGL_LOWLATENCY_DEEPSEEK_SLICES": "none"}).deepseek_slices == ()


def test_no_cuda_archs():
    assert config.parse({"SGL_LOWLATENCY_CUDA_ARCHS": "none"}).cuda_archs == ()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SELF_CHECK", "yes", "is not 0 or 1"),
        ("EMULATE", "", "is not 0 or 1"),
        ("LOG_COVERAGE_S", "soon", "is not a number of seconds"),
        ("LOG_COVERAGE_S", "-1", "is not a finite number of seconds"),
        ("LOG_COVERAGE_S", "nan", "is not a finite number of seconds"),
        ("CUDA_ARCHS", "sm_80", "'sm_80' is not one of sm_90a, sm_100a, sm_103a"),
        ("PLANTED", "46", "is not a number from 0 to 45"),
        ("PLANTED", "-1", "is not a number from 0 to 45"),
        ("DRAFT_SAMPLER", "on", "is not 0 or 1"),
        ("DEEPSEEK_SLICES", "attention", "'attention' is not one of attention_in, attention_out, moe"),
        ("DEEPSEEK_SLICES", "", "'' is not one of attention_in, attention_out, moe"),
        ("DEEPSEEK_SLICES", "1", "'1' is not one of attention_in, attention_out, moe, nor is the value 'none'"),
    ],
)
def test_a_bad_value_raises_and_names_the_variable(name, value, message):
    with pytest.raises(ValueError, match=message) as error:
        config.parse({f"SGL_LOWLATENCY_{name}": value})
    assert f"SGL_LOWLATENCY_{name}={value!r}" in str(error.value)


def test_a_misspelt_variable_raises():
    with pytest.raises(ValueError, match="SGL_LOWLATENCY_SELFCHECK is not a variable of sgl-lowlatency"):
        config.parse({"SGL_LOWLATENCY_SELFCHECK": "0"})


def test_no_environment_sprawl():
    assert len(config.NAMES) <= 8


def test_planted_bound_is_the_enums(repo_root):
    """The last value of dialect::Planted, read from its header."""
    text = (repo_root / "csrc/include/sgl_lowlatency/dialect/planted.hpp").read_text()
    values = [int(line.split("=")[1].split(",")[0]) for line in text.splitlines() if line.strip().startswith("k")]
    assert max(values) == config.MAX_PLANTED


def test_no_other_module_reads_our_variables(repo_root):
    """One module parses SGL_LOWLATENCY_*; others may name a variable in a message."""
    for path in sorted((repo_root / "src").rglob("*.py")):
        if path.name == "config.py" and path.parent.name == "sgl_lowlatency":
            continue
        for line in path.read_text().splitlines():
            reads = any(call in line for call in ("os.environ[", "os.environ.get(", "os.getenv("))
            assert not (reads and "SGL_LOWLATENCY_" in line), f"{path}: {line.strip()}"
