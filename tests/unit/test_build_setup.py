"""setup.py's decisions. Compilers are small scripts, so that every kind of broken toolchain can be put on PATH."""

import importlib.util
import shutil
import subprocess

import pytest

pytest.importorskip("setuptools")


@pytest.fixture
def setup_py(repo_root):
    spec = importlib.util.spec_from_file_location("sgl_lowlatency_setup", repo_root / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(tmp_path):
    """script(name, text) puts an executable on disk and returns its path."""

    def write(name, text):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


def nvcc_text(release):
    return f"echo 'Cuda compilation tools, release {release}, V{release}.1'"


@pytest.mark.parametrize(
    ("version", "archs"),
    [
        ((12, 0), ["sm_90a"]),
        ((12, 8), ["sm_90a", "sm_100a"]),
        ((12, 9), ["sm_90a", "sm_100a", "sm_103a"]),
        ((13, 0), ["sm_90a", "sm_100a", "sm_103a"]),
    ],
)
def test_every_arch_that_nvcc_knows(setup_py, version, archs):
    assert setup_py.choose_archs(version, None) == archs


def test_skipped_archs_are_said(setup_py, capsys):
    setup_py.choose_archs((12, 8), None)
    assert "nvcc 12.8 cannot compile sm_103a" in capsys.readouterr().out


def test_a_requested_arch_that_nvcc_lacks_is_an_error(setup_py):
    with pytest.raises(setup_py.BuildError, match="nvcc 12.8 cannot compile sm_103a: it needs nvcc 12.9 or newer"):
        setup_py.choose_archs((12, 8), ("sm_103a",))


def test_an_old_nvcc_is_an_error(setup_py):
    with pytest.raises(setup_py.BuildError, match="nvcc 11.8 is too old: sm_90a needs 12.0"):
        setup_py.choose_archs((11, 8), None)


def test_no_compiler(setup_py, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(setup_py.BuildError, match="'no-such-compiler' is not on PATH"):
        setup_py.find_cxx()


def test_cuda_home_without_nvcc(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(setup_py.BuildError, match="has no executable bin/nvcc"):
        setup_py.find_nvcc()


def test_cuda_home_wins_over_path(setup_py, script, monkeypatch):
    nvcc = script("nvcc", nvcc_text("13.0"))
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    assert setup_py.find_nvcc() == str(nvcc)
    assert setup_py.nvcc_version(str(nvcc)) == (13, 0)


@pytest.mark.parametrize(
    ("text", "message"), [("exit 3", "does not run"), ("echo hello", "prints no release"), ("kill -9 $$", "does not run")]
)
def test_a_broken_nvcc_is_one_error(setup_py, script, text, message):
    with pytest.raises(setup_py.BuildError, match=message):
        setup_py.nvcc_version(str(script("nvcc", text)))


def test_an_nvcc_that_cannot_compile_is_one_line(setup_py, script, tmp_path):
    nvcc = script("nvcc", "echo 'fatal: unsupported GNU version' >&2; echo more >&2; exit 1")
    with pytest.raises(setup_py.BuildError) as error:
        setup_py.check_nvcc_compiles(str(nvcc), "g++", ["sm_90a"], tmp_path)
    assert str(error.value) == f"{nvcc} cannot compile a kernel with g++: fatal: unsupported GNU version"


def test_no_nvcc_is_a_host_only_build(setup_py, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_py.cuda_toolchain("g++", tmp_path, None) == (None, [])
    assert "building host emulation only" in capsys.readouterr().out
    with pytest.raises(setup_py.BuildError, match="asks for sm_90a and there is no nvcc"):
        setup_py.cuda_toolchain("g++", tmp_path, ("sm_90a",))


def test_an_unwanted_nvcc_is_not_run(setup_py, script, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(script("nvcc", "exit 1").parent.parent))
    assert setup_py.cuda_toolchain("g++", tmp_path, ()) == (None, [])


def test_ninja_parses_the_build_and_it_compiles_every_source(setup_py, repo_root, tmp_path):
    """Oracle: ninja's own list of commands, for a build with CUDA and a planted bug."""
    pytest.importorskip("pybind11")
    ninja = shutil.which("ninja")
    if ninja is None:
        pytest.skip("ninja is not on PATH")
    text = setup_py.ninja_file(tmp_path / "_C.so", tmp_path, "g++", "nvcc", ["sm_90a", "sm_103a"], 4)
    (tmp_path / "build.ninja").write_text(text)
    commands = subprocess.run(
        [ninja, "-C", str(tmp_path), "-t", "commands"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    csrc = repo_root / "csrc"
    sources = {*csrc.glob("bindings/*.cpp"), *csrc.glob("emulation/*.cpp"), *csrc.glob("launch/*.c*"), *csrc.glob("kernels/**/*.cu")}
    assert len(commands) == len(sources) + 1
    for source in sources:
        (command,) = [line for line in commands if f" -c {source} " in line]
        assert "-DSGL_LOWLATENCY_PLANTED=4" in command and "-std=c++17" in command
        assert ("code=sm_103a" in command) is (source.suffix == ".cu")
    assert "-cudart static" in commands[-1] and "torch" not in "".join(commands)
