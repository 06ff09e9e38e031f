#!/usr/bin/env bash
# Everything the project needs, into .venv: `make .venv/ready` runs this. Safe to run again.
# "tensorrt" as argument: the tools of that target instead.
set -euo pipefail
cd "$(dirname "$0")/.."
SITE=.venv/lib/python3.11/site-packages

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
die() { printf '\033[1;31m[setup]\033[0m %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue
        command -v "$candidate"
        return
    done
    die "python 3.11 was not found: apt-get install python3.11 python3.11-venv, or PYTHON=/path/to/python3.11 make ..."
}

check_machine() {
    [ "$(uname -sm)" = "Linux x86_64" ] || die "this needs Linux on x86-64, this is $(uname -sm)"
    local glibc
    glibc=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
    [ "$(printf '2.35\n%s\n' "$glibc" | sort -V | head -1)" = 2.35 ] ||
        die "the Triton server wheel needs glibc 2.35 (Debian 12, Ubuntu 22.04), this machine has $glibc"
}

# A Debian package unpacked into .venv/apt: needs no root and changes nothing outside.
unpack_debian() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    mkdir -p .venv/apt
    (cd .venv/apt && { apt-get -qq download "$1" || { apt-get -qq update && apt-get -qq download "$1"; }; } &&
        dpkg -x "$1"_*.deb .) 2>/dev/null
}

# Debian's python3.11 has no ensurepip; pip then comes from the package that its venv would use.
install_pip() {
    unpack_debian python3-pip-whl ||
        die "this python has no ensurepip: as root, apt-get update && apt-get install python3.11-venv"
    .venv/bin/python "$(echo .venv/apt/usr/share/python-wheels/pip-*.whl)/pip" install --quiet pip
}

make_venv() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        say "reusing .venv"
        return
    fi
    local python
    python=$(find_python)
    say "making .venv with $python"
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv .venv
    else
        "$python" -m venv --without-pip .venv
        install_pip
    fi
}

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check --quiet "$@"; }

# On the default index torch is the CUDA build: gigabytes that nothing here uses.
install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' requirements/build.txt)
    if .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null; then
        return
    fi
    say "installing torch $version (CPU build)"
    pip_install -c requirements/constraints.txt "torch==$version+cpu" 2>/dev/null && return
    say "no CPU build of torch on the configured package index: taking the default one, which brings"
    say "several GB of CUDA libraries. To avoid it press Ctrl-C, set PIP_EXTRA_INDEX_URL to PyTorch's"
    say "CPU wheel index (pytorch.org, 'Get started', compute platform CPU) and run this again."
    pip_install -c requirements/constraints.txt "torch==$version"
}

# The server wheel carries one stub per python; the python backend looks for it beside itself.
install_server() {
    say "installing the Triton server (55 MB)"
    pip_install --no-deps -r requirements/triton.txt
    local server=$SITE/pytriton/tritonserver
    local stub=$server/backends/python/triton_python_backend_stub
    cp -p --remove-destination "$server/python_backend_stubs/3.11/triton_python_backend_stub" "$stub"
    if [[ $(ldd "$stub") == *"libpython3.11.so.1.0 => not found"* ]]; then
        link_libpython
    fi
    [[ $(ldd "$stub") != *"not found"* ]] || die "the stub lacks libraries: $(ldd "$stub" | grep found)"
}

# The stub embeds python: Debian has the library in a package of its own, others beside python.
link_libpython() {
    local library
    library=$(.venv/bin/python - <<'PYTHON'
import pathlib, sysconfig
home = pathlib.Path(sysconfig.get_config_var("LIBDIR"))
for folder in (home, home / (sysconfig.get_config_var("MULTIARCH") or "")):
    if (folder / "libpython3.11.so.1.0").exists():
        print(folder / "libpython3.11.so.1.0")
        break
PYTHON
    )
    if [ -z "$library" ]; then
        say "libpython3.11 is not installed: unpacking its package into .venv"
        unpack_debian libpython3.11 ||
            die "the Triton server needs libpython3.11: as root, apt-get update && apt-get install libpython3.11"
        library=$PWD/.venv/apt/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0
    fi
    ln -sfn "$library" "$SITE/nvidia_pytriton.libs/libpython3.11.so.1.0"  # where the stub's RPATH leads
}

# perf_analyzer wants two libraries that lie in the server wheel under hashed names.
install_perf_analyzer() {
    local home=.venv/perf_analyzer libs=$SITE/nvidia_pytriton.libs
    if [ ! -x "$home/bin/perf_analyzer" ]; then
        say "installing perf_analyzer (14 MB)"
        rm -rf "$home"
        pip_install --no-deps --target "$home" -r requirements/perf_analyzer.txt
    fi
    mkdir -p "$home/lib"
    ln -sfn "$(realpath "$libs"/libb64-*.so.0d)" "$home/lib/libb64.so.0d"
    ln -sfn "$(realpath "$libs"/libcudart-*.so.12*)" "$home/lib/libcudart.so.12"
    cat > .venv/bin/perf_analyzer <<'WRAPPER'
#!/bin/sh
home=$(dirname "$(readlink -f "$0")")/../perf_analyzer
LD_LIBRARY_PATH=$home/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$home/bin/perf_analyzer" "$@"
WRAPPER
    chmod +x .venv/bin/perf_analyzer
    .venv/bin/perf_analyzer --version >/dev/null 2>&1 || [ $? -ne 127 ] ||
        die "perf_analyzer does not start: $(.venv/bin/perf_analyzer --version 2>&1 | head -1)"
}

# Half a gigabyte that only the TensorRT target needs; in a folder of its own.
install_tensorrt_tools() {
    say "installing what builds and tests the TensorRT target (160 MB)"
    rm -rf .venv/tensorrt
    pip_install --no-deps --target .venv/tensorrt -r requirements/tensorrt.txt
    touch .venv/tensorrt/ready
}

if [ "${1:-}" = tensorrt ]; then
    install_tensorrt_tools
    exit
fi
check_machine
make_venv
install_torch
say "installing the pinned wheels"
pip_install -r requirements/dev.txt
install_server
install_perf_analyzer
touch .venv/ready
say "done: .venv is ready"
