#!/usr/bin/env bash
# A few steps of examples/pretrain with ranks as threads and as processes, and with residuals in a file: all must end
# with the same parameters.
#   pretrain.sh REPOSITORY OUTPUT
set -euo pipefail
repository=$1 output=$2
train() {  # NAME OPTIONS...
  bash "$repository/examples/pretrain/run.sh" --ranks 2 --steps 4 --eval-every 2 --eval-windows 64 --sparsity 0.9 \
    --output "$output/$1" "${@:2}"
}
train threads
train mpi --communicator mpi
mkdir -p "$output/files"
train offload --offload "$output/files"
parameters() { grep '"parameters"' "$output/$1/table.json"; }
[[ $(parameters threads | wc -l) == 4 ]]
diff <(parameters threads) <(parameters mpi)
diff <(parameters threads) <(parameters offload)
