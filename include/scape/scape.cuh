#pragma once

// All of scape, with the kernels: for CUDA C++. NCCL and MPI are apart, in nccl/communicator.hpp and mpi/.

#include <scape/cuda/finite.cuh>
#include <scape/cuda/hash.cuh>
#include <scape/cuda/offload.cuh>
#include <scape/cuda/pack.cuh>
#include <scape/cuda/payload.cuh>
#include <scape/cuda/select.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/cuda/update.cuh>
#include <scape/scape.hpp>
