#!/usr/bin/env bash
# A few steps of examples/pretrain with ranks as threads and as processes: both must end with the same parameters.
#   pretrain.sh REPOSITORY OUTPUT
set -euo pipefail
repository=$1 output=$2
for communicator in threads mpi; do
  bash "$repository/examples/pretrain/run.sh" --communicator "$communicator" --ranks 2 --steps 4 --eval-every 2 \
    --eval-windows 64 --sparsity 0.9 --output "$output/$communicator"
done
parameters() { grep '"parameters"' "$output/$1/table.json"; }
[[ $(parameters threads | wc -l) == 4 ]]
diff <(parameters threads) <(parameters mpi)
