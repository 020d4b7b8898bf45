#!/usr/bin/env bash
# Build and install this package where no package registry can be reached.
#
#   benchmark/offline_install.sh PYTHON SITE [PLANTED]
#
# PYTHON   the interpreter that will run it; it must have pip and, for that interpreter, Python.h
# SITE     folder to install into: put it first on PYTHONPATH afterwards (entry points are found there too)
# PLANTED  number of a bug to compile in (default 0: none); only for checks that must see a failure
#
# Needs g++, nvcc (PATH, CUDA_HOME or /usr/local/cuda) for the GPU kernels, and setuptools, pybind11 and ninja importable by
# PYTHON; what PYTHON lacks of them is taken from BUILD_SITE (a site-packages folder, default: that of the python3 on PATH).
# SGL_LOWLATENCY_CUDA_ARCHS=sm_90a shortens the build. Builds in a copy, so that several may run at once.
set -euo pipefail
python=$1 site=$2 planted=${3:-0}
root=$(cd "$(dirname "$0")/.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
unset LD_PRELOAD PYTHONPATH  # nothing of a server's environment belongs in a build
[ -x /usr/local/cuda/bin/nvcc ] && PATH=$PATH:/usr/local/cuda/bin

mkdir -p "$copy/source" "$copy/borrowed" "$site"
site=$(cd "$site" && pwd)
for name in src csrc setup.py pyproject.toml MANIFEST.in README.md LICENSE CONTRIBUTING.md; do
  [ -e "$root/$name" ] && cp -r "$root/$name" "$copy/source/"
done
find "$copy/source" \( -name '*.so' -o -name '*.egg-info' -o -name __pycache__ \) -prune -exec rm -rf {} +
[ -e "$copy/source/README.md" ] || echo "sgl-lowlatency" > "$copy/source/README.md"

build_site=${BUILD_SITE:-$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}
for name in setuptools pybind11 ninja; do
  if ! "$python" -c "import $name" 2>/dev/null; then
    ls -d "$build_site/$name" > /dev/null || { echo "$name is neither in $python nor in $build_site" >&2; exit 1; }
    for item in "$build_site/$name" "$build_site/$name"-*.dist-info; do [ -e "$item" ] && ln -sf "$item" "$copy/borrowed/"; done
  fi
done

started=$(date +%s)
cd "$copy/source"
SGL_LOWLATENCY_PLANTED=$planted PYTHONPATH=$copy/borrowed \
  "$python" -m pip install --verbose --no-index --no-deps --no-build-isolation --no-warn-script-location \
  --disable-pip-version-check --upgrade --target "$site" . \
  > "$copy/log" 2>&1 || { grep -nE 'error|Error' "$copy/log" | head -20; tail -30 "$copy/log"; exit 1; }
cd "$copy"
PYTHONPATH=$site "$python" -c '
from importlib.metadata import entry_points, version
from sgl_lowlatency import _C
names = [e.name for e in entry_points(group="sglang.srt.plugins")]
print("sgl-lowlatency", version("sgl-lowlatency"), _C.backends(), "entry points", names)
assert "nvidia_megakernel" in names, "the entry point is not found"'
echo "installed into $site in $(($(date +%s) - started)) s, planted bug $planted"
