#!/usr/bin/env bash
# A few steps of examples/pretrain, which must end with the same parameters: with ranks as threads and as processes, with
# residuals in a file and payloads that leave while backward runs; and, where masters are sharded, with all of these.
#   pretrain.sh REPOSITORY OUTPUT
set -euo pipefail
repository=$1 output=$2
mkdir -p "$output/files"
train() {  # NAME OPTIONS...
  bash "$repository/examples/pretrain/run.sh" --ranks 2 --steps 4 --eval-every 2 --eval-windows 64 --sparsity 0.9 \
    --output "$output/$1" "${@:2}"
}
parameters() { grep '"parameters"' "$output/$1/table.json"; }
same() { [[ $(parameters "$1" | wc -l) == 4 ]] && diff <(parameters "$1") <(parameters "$2"); }

train threads
train mpi --communicator mpi
same threads mpi
train elsewhere --overlap --offload "$output/files"
same threads elsewhere
train sharded --sharded --payload bfloat16
train all --sharded --payload bfloat16 --overlap --offload "$output/files" --communicator mpi
same sharded all
