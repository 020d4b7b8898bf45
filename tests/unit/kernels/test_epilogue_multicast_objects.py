"""What nvcc makes of epilogue_multicast for each architecture: early launches, system-scope and multicast stores, no spills.

Oracle: PTX and SASS, by name of instruction. Needs nvcc and cuobjdump, no GPU.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"
SOURCE = CSRC / "launch" / "epilogue_multicast.cu"
ARCHS = ["sm_90a", "sm_100a", "sm_103a"]
PUSH = ["push_tilesILi1E", "push_tilesILi2E"]
REDUCE = ["reduce_tilesILi2E", "reduce_tilesILi4E", "reduce_tilesILi8E"]
MULTICAST_PTX = "multimem.st.relaxed.sys.global.v2.f32"
PEER_STORE = r"STG\.E\.64\.STRONG\.SYS"


def cuobjdump():
    """Path, from PATH or from triton's copy, or None."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None:
        path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(path) if path.exists() else None
    return found


def tools():
    nvcc, dump = shutil.which("nvcc"), cuobjdump()
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    if dump is None:
        pytest.skip("no cuobjdump on PATH and none of triton's")
    return nvcc, dump


def compile_for(arch, source, folder, form):
    """(path, what the compiler says). form: -cubin or -ptx."""
    nvcc, _ = tools()
    version = re.search(r"release (\d+)\.(\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout)
    if arch == "sm_103a" and (int(version[1]), int(version[2])) < (12, 9):
        pytest.skip("nvcc older than 12.9 knows no sm_103a")
    out = folder / f"{source.stem}.{arch}{form}"
    includes = [f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    done = subprocess.run(
        [nvcc, "-O3", "-std=c++17", f"-arch={arch}", *includes, "-Xptxas", "-v", form, "-o", str(out), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out, done.stderr


def functions(text, begin):
    """{name: body} of a listing whose functions begin with `begin`."""
    parts = re.split(begin, text)[1:]
    return {part.split(None, 1)[0]: part for part in parts}


def body_of(listing, name):
    bodies = [body for function, body in listing.items() if name in function]
    assert len(bodies) == 1, (name, list(listing))
    return bodies[0]


@pytest.fixture(scope="module", params=ARCHS)
def built(request, tmp_path_factory):
    """(SASS by function, PTX by function, the assembler's report)."""
    _, dump = tools()
    folder = tmp_path_factory.mktemp(request.param)
    cubin, report = compile_for(request.param, SOURCE, folder, "-cubin")
    ptx, _ = compile_for(request.param, SOURCE, folder, "-ptx")
    sass = subprocess.run([dump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    return functions(sass, r"Function : "), functions(ptx.read_text(), r"\.entry "), report


@pytest.mark.parametrize("name", PUSH + REDUCE)
def test_every_kernel_begins_early_and_waits_for_the_launch_in_front(built, name):
    """griddepcontrol.launch_dependents and .wait."""
    sass, ptx, _ = built
    assert "PREEXIT" in body_of(sass, name) and "ACQBULK" in body_of(sass, name)
    assert "griddepcontrol.launch_dependents" in body_of(ptx, name) and "griddepcontrol.wait" in body_of(ptx, name)


@pytest.mark.parametrize("name", PUSH)
def test_tiles_are_pushed_at_system_scope_behind_a_system_fence(built, name):
    sass, ptx, _ = built
    first_store, fence = re.search(PEER_STORE, body_of(sass, name)), re.search(r"MEMBAR\.\w+\.SYS", body_of(sass, name))
    assert fence is not None and first_store is not None and fence.start() < first_store.start()
    assert "fence.acq_rel.sys" in body_of(ptx, name) and "st.relaxed.sys.global.v2.u32" in body_of(ptx, name)


@pytest.mark.parametrize("name", PUSH)
def test_tiles_can_be_pushed_by_multicast(built, name):
    sass, ptx, _ = built
    assert MULTICAST_PTX in body_of(ptx, name)
    unicast = body_of(ptx, name).count("st.relaxed.sys.global.v2.u32")
    assert len(re.findall(PEER_STORE, body_of(sass, name))) >= unicast + body_of(ptx, name).count(MULTICAST_PTX)


@pytest.mark.parametrize("name", REDUCE)
def test_pushed_words_are_read_at_system_scope(built, name):
    sass, ptx, _ = built
    assert re.search(r"LDG\.E\.128\.STRONG\.SYS", body_of(sass, name)) and re.search(r"MEMBAR\.\w+\.SYS", body_of(sass, name))
    assert "ld.relaxed.sys.global.v4.u32" in body_of(ptx, name) and MULTICAST_PTX not in body_of(ptx, name)


def test_nothing_spills(built):
    _, _, report = built
    assert report.count("Compiling entry function") == len(PUSH + REDUCE)
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"} and set(re.findall(r"(\d+) bytes spill loads", report)) == {"0"}


PROBE = """#include <cstdint>
extern "C" __global__ void multicast(float* p, float x, float y) {
  asm volatile("multimem.st.relaxed.sys.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}
extern "C" __global__ void unicast(uint32_t* p, uint32_t x, uint32_t y) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_a_multicast_store_is_a_system_store_whose_address_decides(arch, tmp_path):
    """Why SASS alone cannot show it: the two PTX instructions become the same one."""
    _, dump = tools()
    source = tmp_path / "probe.cu"
    source.write_text(PROBE)
    cubin, _ = compile_for(arch, source, tmp_path, "-cubin")
    sass = functions(subprocess.run([dump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout, r"Function : ")
    stores = {name: re.findall(r"STG\S*[^;]*;\s*/\* 0x\w+ \*/\s*/\* 0x\w+ \*/", body) for name, body in sass.items()}
    assert len(stores["multicast"]) == 1 and re.search(PEER_STORE, stores["multicast"][0])
    assert re.sub(r"\s+", " ", stores["multicast"][0]) == re.sub(r"\s+", " ", stores["unicast"][0])
