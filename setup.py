"""Builds the extension sgl_lowlatency._C with ninja: host emulation always, CUDA kernels where nvcc is found. Beside it, the code objects of
csrc/launch/*.hip where hipcc or clang can compile them, which are loaded at run time.

The extension takes raw pointers and stream handles and links neither torch nor a shared CUDA runtime.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
MIN_CLANG = 20  # of LLVM, and of ROCm from 7.0 on: gfx950
HIP_ARCHS = ("gfx942", "gfx950")
# One linked ELF for one GPU, with neither ROCm's headers nor its device libraries.
HIP_FLAGS = "-x hip --cuda-device-only -nogpuinc -nogpulib --no-gpu-bundle-output -O3 -std=c++20 -fno-exceptions -fuse-cuid=none"
# Ninja starts edges in the order of the file: what takes longest comes first, so that nothing runs alone at the end.
SLOWEST_FIRST = (
    "decode_step.cu", "parallel_step.cu", "parallel_verify.cu", "decode_step_moe_wide.cu", "decode_step_moe.cu", "draft_sampler.cu",
    "parallel_attention_out.cu",
)  # fmt: skip
MIN_NVCC = {"sm_90a": (12, 0), "sm_100a": (12, 8), "sm_103a": (12, 9)}


class BuildError(CompileError):
    """An environment that cannot build the package; the message says what to change."""


def load_config():
    """The parsed SGL_LOWLATENCY_* environment, from the package's own config.py."""
    spec = importlib.util.spec_from_file_location("_sgl_lowlatency_config", ROOT / "src/sgl_lowlatency/config.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    try:
        return module.parse(os.environ)
    except ValueError as error:
        raise BuildError(str(error)) from None


def find_cxx():
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx) is None:
        raise BuildError(f"no C++ compiler: {cxx!r} is not on PATH. Install g++ (11 or newer) or set CXX.")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError(f"Python.h is not in {sysconfig.get_path('include')}. Install the Python development headers.")
    return cxx


def find_nvcc():
    """Path of nvcc, or None. CUDA_HOME wins over PATH; a CUDA_HOME without nvcc is an error, not a host-only build."""
    home = os.environ.get("CUDA_HOME")
    if not home:
        return shutil.which("nvcc")
    nvcc = Path(home, "bin", "nvcc")
    if not os.access(nvcc, os.X_OK):
        raise BuildError(f"CUDA_HOME={home!r} has no executable bin/nvcc. Correct it, or unset it to search PATH.")
    return str(nvcc)


def nvcc_version(nvcc):
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{nvcc} does not run ({error}). Repair it, or set SGL_LOWLATENCY_CUDA_ARCHS=none.") from None
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"{nvcc} --version prints no release: is it NVIDIA's? SGL_LOWLATENCY_CUDA_ARCHS=none skips it.")
    return int(match[1]), int(match[2])


def choose_archs(version, wanted):
    """The architectures to compile: all that this nvcc knows, or exactly the wanted ones. Raises BuildError."""
    known = [arch for arch, least in MIN_NVCC.items() if version >= least]
    for arch in wanted or ():
        if arch not in known:
            least = ".".join(map(str, MIN_NVCC[arch]))
            raise BuildError(f"nvcc {version[0]}.{version[1]} cannot compile {arch}: it needs nvcc {least} or newer.")
    if not known:
        raise BuildError(
            f"nvcc {version[0]}.{version[1]} is too old: sm_90a needs 12.0. Put a newer one on PATH or in CUDA_HOME, or "
            "set SGL_LOWLATENCY_CUDA_ARCHS=none for a host-only build."
        )
    skipped = [arch for arch in MIN_NVCC if arch not in known]
    if skipped and wanted is None:
        print(f"nvcc {version[0]}.{version[1]} cannot compile {', '.join(skipped)} (12.9 can): left out of this build")
    return list(wanted or known)


def gencode(archs):
    return [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]


def check_nvcc_compiles(nvcc, cxx, archs, build_dir):
    """A kernel of one line: finds an nvcc that cannot work with this host compiler before ninja prints pages."""
    probe = build_dir / "nvcc_probe.cu"
    probe.write_text("#include <cstdint>\n__global__ void probe(uint32_t* out) { *out = 1; }\n")
    command = [nvcc, "-std=c++17", "-ccbin", cxx, *gencode(archs), "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise BuildError(f"{nvcc} cannot compile a kernel with {cxx}: {lines[0] if lines else 'no message'}")


def cuda_toolchain(cxx, build_dir, wanted):
    """(nvcc, archs), or (None, []) for a host-only build."""
    if wanted == ():
        print("SGL_LOWLATENCY_CUDA_ARCHS=none: building host emulation only")
        return None, []
    nvcc = find_nvcc()
    if nvcc is None:
        if wanted:
            raise BuildError(f"SGL_LOWLATENCY_CUDA_ARCHS asks for {', '.join(wanted)} and there is no nvcc.")
        print("no nvcc: building host emulation only. Install the CUDA toolkit (12.9 or newer) for GPU kernels.")
        return None, []
    archs = choose_archs(nvcc_version(nvcc), wanted)
    check_nvcc_compiles(nvcc, cxx, archs, build_dir)
    return nvcc, archs


def hip_candidates():
    """Compilers that may know the AMD GPUs, best first: ROCm's, then clangs on PATH from the newest name on."""
    rocm = [Path(home, "bin", "hipcc") for home in (os.environ.get("ROCM_PATH"), "/opt/rocm") if home]
    names = ["hipcc", *(f"clang-{version}" for version in range(30, MIN_CLANG - 1, -1)), "clang"]
    found = [str(path) for path in rocm if os.access(path, os.X_OK)] + [path for path in map(shutil.which, names) if path]
    return list(dict.fromkeys(found))


def hip_refusal(compiler, build_dir):
    """Why a compiler cannot make code objects for every one of HIP_ARCHS, in one line; "" when it can."""
    try:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} does not run ({error})"
    version = re.search(r"clang version (\d+)\.", text)
    if version is None or int(version[1]) < MIN_CLANG:
        return f"{compiler} is {f'clang {version[1]}' if version else 'no clang'}, and {MIN_CLANG} is the oldest that will do"
    probe = build_dir / "hip_probe.hip"
    probe.write_text("#include <cstdint>\nextern \"C\" __attribute__((global)) void probe(uint32_t* out) { *out = 1; }\n")
    for arch in HIP_ARCHS:
        command = [compiler, *HIP_FLAGS.split(), f"--offload-arch={arch}", str(probe), "-o", str(probe.with_suffix(f".{arch}.co"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            return f"{compiler} cannot compile for {arch}: {lines[0] if lines else 'no message'}"
    return ""


def hip_compiler(build_dir):
    """The compiler of the code objects, or None, with every reason said: the package installs without them."""
    reasons = []
    for compiler in hip_candidates():
        refusal = hip_refusal(compiler, build_dir)
        if not refusal:
            return compiler
        reasons.append(refusal)
    print(f"no AMD code objects: {'; '.join(reasons) or f'neither hipcc nor clang {MIN_CLANG} or newer is on PATH'}")
    return None


def code_objects(folder, sources):
    """(source, arch, target) of every code object: k1.gfx950.co in folder."""
    return [(source, arch, folder / f"{source.stem}.{arch}.co") for source in sources for arch in HIP_ARCHS]


def ninja_file(target, build_dir, cxx, nvcc, archs, planted, hip=None, device_objects=()):
    """The text of build.ninja. Paths with spaces are escaped; header dependencies come from the compilers.

    hip: compiler of the device_objects, which code_objects gives.
    """
    import pybind11

    def path(value):
        return str(value).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def rule(name, command, description):
        dependencies = "  depfile = $out.d\n  deps = gcc"
        return f"rule {name}\n  command = {command}\n{dependencies}\n  description = {description}"

    defines = [f"-DSGL_LOWLATENCY_PLANTED={planted}"] if planted else []
    if nvcc:
        defines += ["-DSGL_LOWLATENCY_WITH_CUDA=1", f"'-DSGL_LOWLATENCY_CUDA_ARCHS=\"{' '.join(archs)}\"'"]
    include = [f"'-I{p}'" for p in (CSRC / "include", CSRC)]
    python = [f"'-isystem{p}'" for p in (sysconfig.get_path("include"), pybind11.get_include())]
    flags = " ".join(["-std=c++17", *include, *defines])
    sources = [*sorted((CSRC / "bindings").glob("*.cpp")), *sorted((CSRC / "emulation").glob("*.cpp")), *sorted((CSRC / "launch").glob("*.cpp"))]
    if nvcc:
        kernels = [*sorted((CSRC / "launch").glob("*.cu")), *sorted((CSRC / "kernels").rglob("*.cu"))]
        place = {name: i for i, name in enumerate(SLOWEST_FIRST)}
        sources = [*sorted(kernels, key=lambda source: place.get(source.name, len(place))), *sources]
    link = f"{nvcc} -cudart static -ccbin {cxx} -shared" if nvcc else f"{cxx} -shared -pthread"
    host_flags = "-Xcompiler -fPIC,-fvisibility=hidden --expt-relaxed-constexpr"
    lines = [
        "ninja_required_version = 1.5",
        f"cxxflags = -O3 {flags} -fPIC -fvisibility=hidden -pthread -Wall {' '.join(python)}",
        f"nvccflags = -O3 {flags} -ccbin {cxx} {host_flags} {' '.join(gencode(archs))}",
        rule("cxx", f"{cxx} $cxxflags -MMD -MF $out.d -c $in -o $out", "c++ $in"),
        rule("cuda", f"{nvcc} $nvccflags -MD -MF $out.d -c $in -o $out", "nvcc $in"),
        f"rule link\n  command = {link} $in -o $out\n  description = link $out",
    ]
    objects = []
    for source in sources:
        objects.append(build_dir / "obj" / f"{source.relative_to(CSRC)}.o")
        lines.append(f"build {path(objects[-1])}: {'cuda' if source.suffix == '.cu' else 'cxx'} {path(source)}")
        if source.parent.name == "bindings":  # templates of pybind11, nothing that is called often
            lines.append("  cxxflags = $cxxflags -O1")
    lines.append(f"build {path(target)}: link {' '.join(path(o) for o in objects)}")
    if hip:
        flags = " ".join([HIP_FLAGS, *include, *(define for define in defines if "PLANTED" in define)])
        depend = "-Xclang -dependency-file -Xclang $out.d -Xclang -MT -Xclang $out"  # clang's driver drops -MD of a device alone
        lines.append(rule("hip", f"{hip} {flags} --offload-arch=$arch {depend} $in -o $out", "hip $out"))
    for source, arch, code_object in device_objects:
        lines.append(f"build {path(code_object)}: hip {path(source)}\n  arch = {arch}")
    lines.append(f"default {' '.join(path(made) for made in (target, *(code_object for _, _, code_object in device_objects)))}")
    return "\n".join(lines) + "\n"


class NinjaBuildExt(build_ext):
    def build_extension(self, ext):
        config, cxx = load_config(), find_cxx()
        # An editable install gets a fresh build_temp each time; a folder of its own lets ninja redo only what changed.
        kept = ROOT / "build" / f"ninja-{sys.implementation.cache_tag}"
        build_dir = kept if self.editable_mode else Path(self.build_temp).resolve()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            for directory in (build_dir, target.parent):
                directory.mkdir(parents=True, exist_ok=True)
            nvcc, archs = cuda_toolchain(cxx, build_dir, config.cuda_archs)
            hip, objects = self.hip_objects(build_dir, target.parent / "code_objects")
            build_file = build_dir / "build.ninja"
            build_file.write_text(ninja_file(target, build_dir, cxx, nvcc, archs, config.planted, hip, objects))
        except PermissionError as error:
            raise BuildError(f"the build directory is not writable: {error}") from None
        ninja = shutil.which("ninja")
        if ninja is None:
            import ninja as ninja_package

            ninja = str(Path(ninja_package.BIN_DIR, "ninja"))
        command = [ninja, "-f", str(build_file), "-j", str(os.cpu_count() or 1)]
        if subprocess.run(command, cwd=build_dir).returncode:
            raise BuildError("the compiler failed; its message is above (pip shows it with -v)")

    def hip_objects(self, build_dir, folder):
        """(compiler, code_objects) to build; those of an earlier build that this one does not make again are removed."""
        sources = sorted((CSRC / "launch").glob("*.hip"))
        hip = hip_compiler(build_dir) if sources else None
        objects = code_objects(folder, sources) if hip else []
        for stale in set(folder.glob("*.co")) - {made for _, _, made in objects}:
            stale.unlink()
        if objects:
            folder.mkdir(exist_ok=True)
        return hip, objects

    def copy_extensions_to_source(self):
        """An inplace build leaves what it made in the source tree: the code objects too."""
        super().copy_extensions_to_source()
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            package = ext.name.rpartition(".")[0]
            built, kept = Path(self.build_lib, *package.split("."), "code_objects"), Path(build_py.get_package_dir(package), "code_objects")
            if kept.exists():
                shutil.rmtree(kept)
            if built.is_dir() and any(built.iterdir()):
                shutil.copytree(built, kept)

    def get_source_files(self):
        return [str(p.relative_to(ROOT)) for p in sorted(CSRC.rglob("*")) if p.is_file()]


if __name__ == "__main__":
    setup(ext_modules=[Extension("sgl_lowlatency._C", [])], cmdclass={"build_ext": NinjaBuildExt})
