#!/usr/bin/env bash
# Tests and measures the CUDA backend on the GPU of this machine, in less than 8 minutes; prints one table last. Needs
# CUDA 12 or later with nvcc, NCCL, CMake, g++, python3 and Debian's libbenchmark-dev, doctest-dev, nlohmann-json3-dev.
#
#   bench/device.sh [ARGUMENTS OF GOOGLE BENCHMARK...]     e.g. --benchmark_filter='copy|accumulate'
#
#   SCAPE_ARCHITECTURES      CMAKE_CUDA_ARCHITECTURES (native; "80;90;100" builds for three generations)
#   SCAPE_DEVICE_TESTS       tests, as in "bit_packer topk_masker"; "none": no tests (all)
#   SCAPE_BENCH_ELEMENTS     float32 elements (268435456)
#   SCAPE_BENCH_ITERATIONS   timed runs of a benchmark, the fastest of which counts (20)
#   SCAPE_DEVICE_BUILD       build folder, where the results stay as device.json (build/device)
#
# On a simulator, which tests all of this but speed: small sizes, and
#   SCAPE_RUN                goes before every program that uses the GPU, as in "simulator --option --"
#   SCAPE_CMAKE_ARGS         more arguments of cmake, as in "-DCMAKE_CUDA_RUNTIME_LIBRARY=Shared"
#   CUDAFLAGS                flags of nvcc, as in "--no-compress"; CMake reads it when a folder is first configured
# With SCAPE_RUN compute-sanitizer is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${SCAPE_DEVICE_BUILD:-build/device}
read -ra run <<< "${SCAPE_RUN:-}"
read -ra arguments <<< "${SCAPE_CMAKE_ARGS:-}"
read -ra tests <<< "${SCAPE_DEVICE_TESTS:-}"
arguments+=(-DCMAKE_BUILD_TYPE=Release "-DCMAKE_CUDA_ARCHITECTURES=${SCAPE_ARCHITECTURES:-native}")
status=0

say() { printf '\n== %s\n' "$*"; }
failed() {
  say "FAILED: $*"
  status=1
}

# Most tests of several ranks need eight devices; with fewer only those run that need one.
run_tests() {
  local launcher pattern=. targets=(cuda_tests) label=cuda
  if [[ ${#run[@]} -eq 0 && $(nvidia-smi -L 2>/dev/null | wc -l) -lt 8 ]]; then label=one-device; fi
  if [[ ${#tests[@]} -gt 0 ]]; then
    targets=("${tests[@]/%/_test}")
    targets=("${targets[@]/#/cuda_}")
    pattern="^cuda\\.($(IFS='|'; echo "${tests[*]}"))$"
  fi
  launcher=$(IFS=';'; echo "${run[*]}")
  cmake -S . -B "$build/tests" -DSCAPE_TESTS=ON -DSCAPE_CUDA=ON "-DSCAPE_CUDA_LAUNCHER=$launcher" "${arguments[@]}" &&
    cmake --build "$build/tests" --parallel "$(nproc)" --target "${targets[@]}" &&
    ctest --test-dir "$build/tests" --output-on-failure --timeout 120 -L "$label" -R "$pattern"
}

if [[ ${tests[*]} != none ]]; then
  say "Tests"
  run_tests || failed "the tests"
  fast=$build/tests/tests/cuda_bit_packer_test
  if [[ ${#run[@]} -eq 0 && -x $fast ]] && command -v compute-sanitizer > /dev/null; then
    say "compute-sanitizer"
    timeout 120 compute-sanitizer --error-exitcode 1 "$fast" || failed "compute-sanitizer"
  fi
fi

say "Benchmarks"
cmake -S bench -B "$build/bench" -DSCAPE_BENCH_CUDA=ON "${arguments[@]}"
cmake --build "$build/bench" --parallel "$(nproc)" --target cuda_bench
timeout 240 "${run[@]}" "$build/bench/cuda_bench" --benchmark_repetitions=2 --benchmark_out="$build/device.json" "$@"
echo
bench/table.py "$build/device.json"
exit $status
