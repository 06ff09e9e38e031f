#!/usr/bin/env bash
# Builds the CPU kernels into artifacts/native/libhybrid_ops.so: `make native` runs this, which is
# quick and does nothing where no source changed. Without a compiler or the headers it says so, and
# the ops run as their functions. "asan" as argument: with AddressSanitizer, into another file.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=../artifacts/native
LIBRARY=$OUT/libhybrid_ops.so
FLAGS=(-O3 -DNDEBUG)
WIDE=(-mavx512f -mfma -mf16c)
if [ "${1:-}" = asan ]; then
    LIBRARY=$OUT/libhybrid_ops_asan.so
    FLAGS=(-O1 -g -fsanitize=address -fno-omit-frame-pointer -DWIDE_ANYWHERE)
    WIDE=(-mavx2 -mfma -mf16c -Wno-psabi)  # the sixteen lanes of the AVX-512 form on any machine, as pairs of eight
fi
# ONNX Runtime's headers: no wheel has them, Debian's package does. A library built with those of an
# earlier version runs in later ones.
HEADERS=pool/main/o/onnxruntime/libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb
HEADERS_SHA256=14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08

say() { printf '\033[1m[native]\033[0m %s\n' "$*"; }
skip() { say "$*: no CPU kernels, models run without them (slower)"; exit 0; }

# The include folder, from $ORT_INCLUDE, the system, or the package unpacked into artifacts/.
find_headers() {
    local folder
    for folder in "${ORT_INCLUDE:-}" /usr/include/onnxruntime "$OUT/headers/usr/include/onnxruntime"; do
        [ -f "$folder/onnxruntime_cxx_api.h" ] && echo "$folder" && return
    done
    command -v dpkg >/dev/null && [ -x /usr/lib/apt/apt-helper ] || return 1
    local mirror
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^ *#' |
        grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 | tr -d ' ')
    [ -n "$mirror" ] || return 1
    /usr/lib/apt/apt-helper -qq download-file "${mirror%/}/$HEADERS" "$OUT/headers.deb" \
        "SHA256:$HEADERS_SHA256" 2>/dev/null || return 1
    dpkg -x "$OUT/headers.deb" "$OUT/headers"
    echo "$OUT/headers/usr/include/onnxruntime"
}

compile() { # object source flags...
    local object=$1 source=$2
    shift 2
    "$CXX" -std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -I. -isystem "$INCLUDE" \
        -DORT_API_MANUAL_INIT "${FLAGS[@]}" "$@" -c "$source" -o "$object"
}

if [ -f "$LIBRARY" ] && [ -z "$(find . -newer "$LIBRARY" \( -name '*.cc' -o -name '*.h' -o -name build.sh \))" ]; then
    exit 0
fi
CXX=${CXX:-g++}
command -v "$CXX" >/dev/null || skip "no C++ compiler ($CXX)"
mkdir -p "$OUT"
INCLUDE=$(find_headers) || skip "ONNX Runtime's headers were not found (ORT_INCLUDE may name their folder)"

scratch=$(mktemp -d "$OUT/build.XXXX")
trap 'rm -rf "$scratch"' EXIT
jobs=()
for source in native/*.cc */cpu.cc */cpu_sparse.cc; do
    compile "$scratch/${source//\//_}.o" "$source" -ffp-contract=off & jobs+=($!)
done
for source in */cpu_kernel.cc; do
    compile "$scratch/${source//\//_}.avx2.o" "$source" -DFORM=avx2 -DLANES=8 -mavx2 -mfma -mf16c & jobs+=($!)
    compile "$scratch/${source//\//_}.avx512.o" "$source" -DFORM=avx512 -DLANES=16 "${WIDE[@]}" & jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || { say "it does not compile"; exit 1; }; done
"$CXX" -shared "${FLAGS[@]}" "$scratch"/*.o -o "$scratch/library.so"
mv "$scratch/library.so" "$LIBRARY"
say "built ${LIBRARY#../}"
