#!/usr/bin/env bash
# Configures, builds and tests everything that needs no GPU, on a Debian 12 machine that has only git:
#
#   tests/run.sh [PRESET...]        presets: host host-clang asan tsan; all of them by default
#
# Packages that are missing are installed with apt first, through sudo where the user is not root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

presets=("$@")
[[ $# -gt 0 ]] || presets=(host host-clang asan tsan)

say() { printf '\n== %s\n' "$*"; }

# The script of examples/pretrain, which is one of the tests, installs what that example needs.
packages=(g++ clang libclang-rt-dev cmake ninja-build doctest-dev nlohmann-json3-dev
          libopenmpi-dev openmpi-bin libmpich-dev mpich qemu-user g++-aarch64-linux-gnu)
missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
done
if [[ ${#missing[@]} -gt 0 ]]; then
  say "Installing ${missing[*]}"
  as_root=()
  [[ $(id -u) -eq 0 ]] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
fi

# The sanitizers of GCC 12 start only by luck where the kernel spreads addresses widely (vm.mmap_rnd_bits = 32).
fixed_addresses=()
if setarch -R true 2>/dev/null; then fixed_addresses=(setarch -R); fi

export CTEST_PARALLEL_LEVEL="${CTEST_PARALLEL_LEVEL:-$(nproc)}"
for preset in "${presets[@]}"; do
  run=()
  if [[ $preset == *san ]]; then run=("${fixed_addresses[@]}"); fi
  say "$preset: configure"
  together=()  # where everything has yet to be compiled
  [[ -e build/$preset/CMakeCache.txt ]] || together=(-D SCAPE_TESTS_TOGETHER=ON)
  cmake --preset "$preset" "${together[@]}"
  say "$preset: build"
  "${run[@]}" cmake --build --preset "$preset" --parallel "$(nproc)"
  say "$preset: test"
  "${run[@]}" ctest --preset "$preset"
done
