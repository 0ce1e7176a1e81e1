#!/usr/bin/env bash
# Measures the host backend; prints one table last. Debian 12; packages that are missing are installed with apt first.
#
#   bench/host.sh [ARGUMENTS OF GOOGLE BENCHMARK...]       e.g. --benchmark_filter='copy|select'
#
#   SCAPE_BENCH_ELEMENTS     float32 elements (33554432)
#   SCAPE_BENCH_THREADS      threads (all)
#   SCAPE_BENCH_ITERATIONS   timed runs of a benchmark, the fastest of which counts (7)
#   SCAPE_BENCH_CLOCK        cpu: CPU time over the number of threads, where others use the machine too (wall time)
#   SCAPE_BENCH_HUGE_PAGES   1: all arrays in pages of 2 MiB (ordinary ones)
#   SCAPE_BENCH_PIN          1: the threads keep to a CPU each, where the system wakes them late or in one place
#   SCAPE_BENCH_BUILD        build folder, where the results stay as host.json (build/bench)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${SCAPE_BENCH_BUILD:-build/bench}

missing=()
for package in libbenchmark-dev cmake g++ ninja-build python3; do
  [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
done
if [[ ${#missing[@]} -gt 0 ]]; then
  as_root=()
  [[ $(id -u) -eq 0 ]] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
fi

cmake -S bench -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSCAPE_BENCH_CUDA=OFF
cmake --build "$build" --parallel
"$build/host_bench" --benchmark_repetitions=2 --benchmark_out="$build/host.json" "$@"
echo
bench/table.py "$build/host.json"
