"""ELF, its note and llvm-objdump's text. Oracle: llvm-readelf's own reading where it is present, and values that the sources state."""

import re
import subprocess

import pytest

import cdna
from cdna import fixtures, msgpack, toolchain
from cdna.disassembly import parse
from cdna.tables import mnemonics


def test_a_kernel_and_its_metadata():
    code = cdna.CodeObject.read(fixtures.FOLDER / "ring.gfx950.co")
    kernel = code.kernels["ring_right"]
    assert code.isa == "gfx950" and set(code.kernels) == {"ring_right", "ring_one_too_many", "ring_no_barrier"}
    assert (kernel.lds_bytes, kernel.max_workgroup, kernel.scratch_bytes) == (4 * 256 * 16, 256, 0)
    assert [(a.offset, a.size, a.kind) for a in kernel.arguments] == [(0, 8, "global_buffer"), (8, 8, "global_buffer"), (16, 4, "by_value")]
    first = fixtures.load("ring", "gfx950")
    assert first.instructions[first.index_of(kernel.entry)].mnemonic == "s_load_dwordx4"


def test_metadata_is_what_readelf_says():
    reason = toolchain.missing("llvm-readelf")
    if reason:
        pytest.skip(reason)
    path = fixtures.FOLDER / "handover.gfx950.co"
    text = subprocess.run([toolchain.find("llvm-readelf"), "--notes", str(path)], capture_output=True, text=True, check=True).stdout
    for name, kernel in cdna.CodeObject.read(path).kernels.items():
        (block,) = [part for part in re.split(r"\n  - (?=\.agpr_count)", text) if re.search(rf"\.name:\s+'?{name}'?\n", part)]
        for key, value in {"vgpr_count": kernel.vgprs, "sgpr_count": kernel.sgprs, "kernarg_segment_size": kernel.kernarg_bytes}.items():
            assert int(re.search(rf"\.{key}:\s+(\d+)", block)[1]) == value


def test_what_is_no_code_object_is_refused(tmp_path):
    path = tmp_path / "a.co"
    for content in (b"", b"\x7fELF\x01\x01" + bytes(60), b"__CLANG_OFFLOAD_BUNDLE__" + bytes(60)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not an ELF64 AMDGPU code object"):
            cdna.CodeObject.read(path)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x05", 5),
        (b"\xe0", -32),
        (b"\xcc\xff", 255),
        (b"\xcd\x01\x00", 256),
        (b"\xd1\xff\x00", -256),
        (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xcf" + bytes(7) + b"\x09", 9),
        (b"\xc2", False),
        (b"\xc3", True),
        (b"\xc0", None),
        (b"\xa2hi", "hi"),
        (b"\xd9\x03abc", "abc"),
        (b"\x92\x01\xa1x", [1, "x"]),
        (b"\xdc\x00\x01\x07", [7]),
        (b"\x81\xa1k\x92\x01\x02", {"k": [1, 2]}),
        (b"\xde\x00\x01\xa1k\x03", {"k": 3}),
    ],
)
def test_messagepack(data, value):
    assert msgpack.decode(data) == value


def test_other_types_of_messagepack_are_refused():
    with pytest.raises(ValueError, match="type 0xcb at byte 0"):
        msgpack.decode(b"\xcb" + bytes(8))


@pytest.mark.parametrize(
    ("text", "operands", "modifiers"),
    [
        ("s_waitcnt vmcnt(2) lgkmcnt(0)", (), {"vmcnt(2)": "", "lgkmcnt(0)": ""}),
        ("buffer_wbl2 sc0 sc1", (), {"sc0": "", "sc1": ""}),
        ("global_load_dwordx4 v[2:5], v0, s[4:5] offset:16 nt", ("v[2:5]", "v0", "s[4:5]"), {"offset": "16", "nt": ""}),
        ("global_load_lds_dwordx4 v[0:1], off offset:-64 sc1", ("v[0:1]", "off"), {"offset": "-64", "sc1": ""}),
        ("buffer_load_dwordx4 v1, s[0:3], 0 offen lds", ("v1", "s[0:3]", "0"), {"offen": "", "lds": ""}),
        ("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[0:1] op_sel_hi:[0,1,1]", ("v[0:1]", "v[2:3]", "v[4:5]", "v[0:1]"), {"op_sel_hi": "[0,1,1]"}),
        ("v_mov_b32_dpp v1, v2 quad_perm:[1,0,3,2] row_mask:0xf", ("v1", "v2"), {"quad_perm": "[1,0,3,2]", "row_mask": "0xf"}),
        ("v_add_f32_e64 v1, -|v2|, |s3| clamp mul:2", ("v1", "-|v2|", "|s3|"), {"clamp": "", "mul": "2"}),
        ("s_getreg_b32 s0, hwreg(HW_REG_XCC_ID, 0, 4)", ("s0", "hwreg(HW_REG_XCC_ID, 0, 4)"), {}),
        ("ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,1)", ("v0", "v1"), {"offset": "swizzle(SWAP,1)"}),
        ("s_endpgm", (), {}),
    ],
)
def test_instructions_are_split(text, operands, modifiers):
    (instruction,) = parse(f"\t{text}      // 0000000019A4: 12345678 9ABCDEF0 <k+0x4>\n")
    assert (instruction.operands, instruction.modifiers, instruction.address, instruction.size) == (operands, modifiers, 0x19A4, 8)
    (tight,) = parse(f"\t{text}// 0000000019A4: 12345678\n")
    assert (tight.operands, tight.size) == (operands, 4)


def test_every_fixture_can_be_run():
    for name, isa in fixtures.HIP + fixtures.TRITON_KERNELS:
        assert fixtures.load(name, isa).unknown() == []


def test_fixtures_name_no_folder_of_the_machine_that_made_them():
    """Sections for debuggers would: their names are in the file too."""
    assert [path.name for path in fixtures.FOLDER.glob("*.co") if b".debug_" in path.read_bytes()] == []


def test_instructions_that_the_tests_run_exist(repo_root, tmp_path):
    """The assembler takes every line that these tests give to the interpreter, and reads it back as the same instruction."""
    reason = toolchain.missing("llvm-mc", "llvm-objdump")
    if reason:
        pytest.skip(reason)
    wanted = set()
    for path in sorted((repo_root / "tests/unit/cdna").glob("test_*.py")):
        for text in re.findall(r"""["']((?:v|s|ds|global|flat|buffer|scratch)_[a-z0-9_]+(?: [^"'{}]*)?)["'](?!:)""", path.read_text()):
            mnemonic = re.sub(r"_(e32|e64|dpp|sdwa)$", "", text.split()[0])
            if mnemonic in mnemonics() and (" " in text or mnemonic in ("s_barrier", "s_endpgm")):
                wanted.add(text)
    assert len(wanted) > 150
    refused = {}
    for isa in ("gfx950", "gfx942"):
        source, target = tmp_path / "a.s", tmp_path / "a.o"
        lines = sorted(wanted if isa == "gfx950" else refused)
        source.write_text("\n".join(lines) + "\n")
        command = [toolchain.find("llvm-mc"), "-triple=amdgcn-amd-amdhsa", f"-mcpu={isa}", "-filetype=obj", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        refused = {lines[int(number) - 1]: why for number, why in re.findall(r"a\.s:(\d+):\d+: error: (.*)", done.stderr)}
        good = [line for line in lines if line not in refused]
        source.write_text("\n".join(good) + "\n")
        subprocess.run(command, check=True)
        read_back = parse(toolchain.disassemble(target))
        assert [r.mnemonic for r in read_back] == [line.split()[0] for line in good]
    assert refused == {}
