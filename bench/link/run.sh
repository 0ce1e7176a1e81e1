#!/usr/bin/env bash
# What compression gains on links of given rates: trains the model of examples/pretrain over MPI and TCP on a loopback
# that is limited to them, in a network namespace of its own (so it must run as root). Debian 12; installs what is
# missing. Tables go to standard output and into docs/link.md.
#
#   bench/link/run.sh [PART...]        all parts by default: 8 minutes on two cores, 20 with what is installed
#
#   grid      dense and compressed, 2 and 4 ranks, four rates: where a step's time goes, bytes, speed-up
#   loss      the validation loss that each reaches in equal wall time
#   parity    at the rate where the dense step spends 82.4% of its time communicating, as in the paper
#   backward  what it gains to send the payload in buckets while backward runs
#   fill-in   how dense the union of the ranks' own top-k is, beside partitioned masks
#   model     step times predicted on paper: checked against the grid and the paper, carried to large clusters
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
parts=("$@")
(($#)) || parts=(grid loss parity backward fill-in model)

for part in "${parts[@]}"; do
  [[ $part =~ ^(grid|loss|parity|backward|fill-in|model)$ ]] || { echo "bench/link/run.sh: no such part: $part" >&2; exit 2; }
done
limited=$(printf '%s\n' "${parts[@]}" | grep -cE '^(grid|loss|parity|backward)$' || true)
if ((limited && EUID != 0)); then
  echo "bench/link/run.sh: grid, loss, parity and backward limit a network interface of a namespace: run as root" >&2
  exit 1
fi

missing=()
for package in python3 iproute2 gnuplot-nox; do
  [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  as_root=()
  ((EUID == 0)) || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

bash "$root/examples/pretrain/run.sh" --help >/dev/null  # installs and builds what that example needs
if [[ " ${parts[*]} " == *" fill-in "* ]]; then
  build=$root/build/link
  mkdir -p "$build"
  {
    cmake -S "$here" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$root/build/pretrain/prefix"
    cmake --build "$build"
  } >"$build/build.log" 2>&1 || { cat "$build/build.log" >&2; exit 1; }
fi

for part in "${parts[@]}"; do
  case $part in
    grid | loss | parity | backward) unshare --net bash -c 'ip link set lo up && exec "$@"' - "$here/measure.py" "$part" ;;
    fill-in) "$here/measure.py" fill-in ;;
    model) "$here/model.py" ;;
  esac
done
