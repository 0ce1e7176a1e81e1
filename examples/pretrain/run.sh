#!/usr/bin/env bash
# Installs what is missing (Debian), builds, trains, writes tables and pictures. Options: run.sh --help
# With --communicator mpi, under mpirun: one process a rank, --ranks of them or 4.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/pretrain
bible=$build/bible.txt

packages=(g++ cmake ninja-build libtorch-dev libopenblas0-pthread libcli11-dev nlohmann-json3-dev bible-kjv gnuplot-nox
  libopenmpi-dev openmpi-bin)

install_missing() {
  local missing=() package
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  echo "Installing ${missing[*]}"
  local as_root=()
  ((EUID == 0)) || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# LibTorch takes whatever BLAS the system points at; the reference one is 30 times slower.
check_blas() {
  local library
  library=$(readlink -f "/usr/lib/$(gcc -print-multiarch)/libblas.so.3")
  [[ $library == */openblas* ]] ||
    echo "Slow: LibTorch will use $library. To use OpenBLAS: update-alternatives --config libblas.so.3-$(gcc -print-multiarch)" >&2
}

if command -v apt-get >/dev/null; then
  install_missing
  check_blas
else
  echo "This is not Debian, so nothing is installed. Needed: ${packages[*]}" >&2
fi

mkdir -p "$build"
{
  cmake -S "$root" -B "$build/scape" -G Ninja -DCMAKE_INSTALL_PREFIX="$build/prefix"
  cmake --install "$build/scape"
  cmake -S "$here" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$build/prefix"
  cmake --build "$build"
} >"$build/build.log" 2>&1 || { cat "$build/build.log" >&2; exit 1; }

[[ -s $bible ]] || bible -f Gen1:1-Rev22:21 | cut -d ' ' -f 2- >"$bible"  # the verses without their numbers

launch=()
if [[ " $* " == *" --communicator mpi "* || " $* " == *" --communicator=mpi "* ]]; then
  ranks=4
  for ((i = 1; i <= $#; ++i)); do
    case ${!i} in
      --ranks) next=$((i + 1)) && ranks=${!next} ;;
      --ranks=*) ranks=${!i#*=} ;;
    esac
  done
  launch=(mpirun --oversubscribe --bind-to none -np "$ranks")
  ((EUID == 0)) && launch+=(--allow-run-as-root)
fi

exec "${launch[@]}" "$build/pretrain" --text "$bible" --output "$root/runs/pretrain" "$@"
