"""setup.py's decisions. Compilers are small scripts, so that every kind of broken toolchain can be put on PATH."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

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
    sources = {*csrc.glob("bindings/*.cpp"), *csrc.glob("emulation/*.cpp"), *csrc.glob("launch/*.cpp"), *csrc.rglob("*.cu")}
    assert len(commands) == len(sources) + 1
    for source in sources:
        (command,) = [line for line in commands if f" -c {source} " in line]
        assert "-DSGL_LOWLATENCY_PLANTED=4" in command and "-std=c++17" in command
        assert ("code=sm_103a" in command) is (source.suffix == ".cu")
        level = command.rsplit(" -O", 1)[1][0]  # a compiler takes the last one
        assert level == ("1" if source.parent.name == "bindings" else "3"), source
    assert [Path(line.split(" -c ")[1].split()[0]).name for line in commands[: len(setup_py.SLOWEST_FIRST)]] == list(setup_py.SLOWEST_FIRST)
    assert "-cudart static" in commands[-1] and "torch" not in "".join(commands)


CLANG_22 = "if [ \"$1\" = --version ]; then echo 'clang version 22.1.0'; exit 0; fi"


def only_on_path(monkeypatch, folder):
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CLANG_22, ""),
        ("echo 'clang version 19.1.0'", "is clang 19, and 20 is the oldest that will do"),
        ("echo hello", "is no clang, and 20 is the oldest that will do"),
        ("exit 1", "does not run"),
        (f"{CLANG_22}; echo 'error: unable to execute ld.lld' >&2; exit 1", "cannot compile for gfx942: error: unable to execute ld.lld"),
        (f"{CLANG_22}; case \"$*\" in *gfx950*) echo 'unknown target CPU' >&2; exit 1;; esac", "cannot compile for gfx950: unknown target CPU"),
    ],
)
def test_a_compiler_of_code_objects_is_tried_before_it_is_used(setup_py, script, tmp_path, text, message):
    refusal = setup_py.hip_refusal(str(script("clang-22", text)), tmp_path)
    assert message in refusal and bool(refusal) is bool(message)


def test_no_compiler_of_code_objects_is_no_error(setup_py, monkeypatch, tmp_path, capsys):
    only_on_path(monkeypatch, tmp_path)
    assert setup_py.hip_compiler(tmp_path) is None
    assert capsys.readouterr().out == "no AMD code objects: neither hipcc nor clang 20 or newer is on PATH\n"


def test_the_next_compiler_is_taken_where_one_will_not_do(setup_py, script, monkeypatch, tmp_path, capsys):
    script("hipcc", "echo 'HIP version: 5.2'; echo 'clang version 14.0.6'")
    clang = script("clang-22", CLANG_22)
    only_on_path(monkeypatch, clang.parent)
    assert setup_py.hip_compiler(tmp_path) == str(clang)
    clang.unlink()
    assert setup_py.hip_compiler(tmp_path) is None
    assert "hipcc is clang 14, and 20 is the oldest that will do" in capsys.readouterr().out


def test_rocms_compiler_comes_first(setup_py, script, monkeypatch, tmp_path):
    hipcc, clang = script("hipcc", CLANG_22), script("clang-22", CLANG_22)
    only_on_path(monkeypatch, clang.parent)
    monkeypatch.setenv("ROCM_PATH", str(hipcc.parent.parent))
    assert setup_py.hip_candidates() == [str(hipcc), str(clang)]


def test_code_objects_are_compiled_for_every_gpu(setup_py, tmp_path):
    """Oracle: ninja's own list of commands, and the objects that a real clang makes of a kernel."""
    pytest.importorskip("pybind11")
    ninja = shutil.which("ninja")
    if ninja is None:
        pytest.skip("ninja is not on PATH")
    source, folder = tmp_path / "k 1.hip", tmp_path / "code_objects"
    source.write_text('#include "k.hpp"\nextern "C" __attribute__((global)) void k(int* x) { *x = kValue; }\n')
    (tmp_path / "k.hpp").write_text("#pragma once\nconstexpr int kValue = SGL_LOWLATENCY_PLANTED;\n")
    objects = setup_py.code_objects(folder, [source])
    assert [made.name for _, _, made in objects] == ["k 1.gfx942.co", "k 1.gfx950.co"]
    hip = setup_py.hip_compiler(tmp_path) or "absent-clang"
    text = setup_py.ninja_file(tmp_path / "_C.so", tmp_path, "g++", None, [], 4, hip, objects)
    (tmp_path / "build.ninja").write_text(text)
    commands = subprocess.run([ninja, "-C", str(tmp_path), "-t", "commands", *(str(made) for _, _, made in objects)],
                              capture_output=True, text=True, check=True).stdout.splitlines()
    for arch in ("gfx942", "gfx950"):
        (command,) = [line for line in commands if f"--offload-arch={arch} " in line]
        assert "--cuda-device-only" in command and "-DSGL_LOWLATENCY_PLANTED=4" in command
    if hip == "absent-clang":
        pytest.skip("no compiler for the AMD GPUs: the objects themselves were not made")
    run = [ninja, "-C", str(tmp_path), *(str(made) for _, _, made in objects)]
    subprocess.run(run, check=True, capture_output=True)
    before = [made.read_bytes() for _, _, made in objects]
    assert all(content[:4] == b"\x7fELF" for content in before) and before[0] != before[1]
    assert "no work to do" in subprocess.run(run, check=True, capture_output=True, text=True).stdout
    (tmp_path / "k.hpp").write_text("#pragma once\nconstexpr int kValue = 77;\n")  # a header is a dependency
    subprocess.run(run, check=True, capture_output=True)
    assert [made.read_bytes() for _, _, made in objects] != before


def test_an_inplace_build_leaves_its_code_objects_in_the_source_tree(setup_py, tmp_path, monkeypatch):
    """And none of an earlier build that this one did not make."""
    source, built = tmp_path / "src/pkg", tmp_path / "lib/pkg"
    for folder, names in ((source / "code_objects", ["old.gfx950.co"]), (built / "code_objects", ["k1.gfx950.co"])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(name)
    monkeypatch.setattr(setup_py.build_ext, "copy_extensions_to_source", lambda self: None)
    command = setup_py.NinjaBuildExt.__new__(setup_py.NinjaBuildExt)
    command.extensions, command.build_lib = [setup_py.Extension("pkg._C", [])], str(tmp_path / "lib")
    command.get_finalized_command = lambda name: SimpleNamespace(get_package_dir=lambda package: str(source))
    command.copy_extensions_to_source()
    assert [path.name for path in (source / "code_objects").iterdir()] == ["k1.gfx950.co"]
    shutil.rmtree(built / "code_objects")
    command.copy_extensions_to_source()
    assert not (source / "code_objects").exists()
