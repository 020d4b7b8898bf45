"""What an installation has of AMD's code objects, and how it says so."""

import pytest

from sgl_lowlatency.kernels import code_objects


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(code_objects, "FOLDER", tmp_path)
    return tmp_path


def test_none_is_built(folder):
    assert code_objects.installed() == {"k1": [], "k2": []}
    assert code_objects.line() == "none; reinstall sgl-lowlatency where ROCm 7's hipcc is on PATH, or clang 20 or newer with lld"
    with pytest.raises(FileNotFoundError, match=r"kernel k2 is not built for gfx942 in this installation .*: reinstall sgl-lowlatency"):
        code_objects.read("k2", "gfx942")


def test_some_are_built(folder):
    for name in ("k1.gfx942.co", "k1.gfx950.co", "k2.gfx950.co", "other.gfx950.co"):
        (folder / name).write_bytes(name.encode())
    assert code_objects.installed() == {"k1": ["gfx942", "gfx950"], "k2": ["gfx950"]}
    assert code_objects.line() == "k1: gfx942, gfx950; k2: gfx950"
    assert code_objects.read("k2", "gfx950") == b"k2.gfx950.co"


def test_version_and_doctor_say_it(folder, capsys):
    from sgl_lowlatency.cli import version

    assert any(line == f"AMD code objects: {code_objects.line()}" for line in version.lines())


def test_names_are_those_of_the_sources(repo_root):
    """setup.py names an object after its source; every source is a kernel here."""
    sources = {path.stem for path in (repo_root / "csrc/launch").glob("*.hip")}
    assert sources == set(code_objects.KERNELS)
