#!/usr/bin/env bash
# Trains with each optimizer at several learning rates and collects the results in runs/sweep/sweep.csv. Options are
# those of run.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=$(cd "$here/../.." && pwd)/runs/sweep
mkdir -p "$output"

train() {  # NAME OPTION...: appends the rows of the run's table
  local name=$1
  shift
  nice bash "$here/run.sh" --quiet --output "$output/$name" "$@"
  [[ -s $output/sweep.csv ]] || head -n 1 "$output/$name/table.csv" >"$output/sweep.csv"
  tail -n +2 "$output/$name/table.csv" >>"$output/sweep.csv"
}

rm -f "$output/sweep.csv"
for rate in 0.002 0.004 0.008; do train "adamw-$rate" --optimizers adamw --lr-adamw $rate "$@"; done
for rate in 0.0006 0.001 0.002; do train "adams-$rate" --optimizers adams --lr-adams $rate "$@"; done
for rate in 0.001 0.002 0.004; do train "scape-$rate" --optimizers scape --lr-scape $rate "$@"; done
for rate in 0.0006 0.001 0.0015; do train "clock-$rate" --optimizers clock --lr-clock $rate "$@"; done
cut -d, -f1-4 "$output/sweep.csv"
