#pragma once

#include <cstddef>
#include <cstdint>

namespace scape::inline v0 {

/// What one step did on one rank, filled on request.
struct StepReport {
  std::size_t step = 0;             ///< counted from 0
  double density = 0;               ///< that the mask in use was made for
  std::size_t kept = 0;             ///< elements of the payload
  std::uint64_t mask_bytes = 0;     ///< sent by this rank for the masks that the step made; counted by the communicator
  std::uint64_t payload_bytes = 0;  ///< the same for the payload
  std::uint64_t parameter_bytes = 0;  ///< the same for new values of kept parameters, where they are sharded
  std::uint64_t compare_bytes = 0;    ///< the same for what ranks compare
  /// Of the reduced payload, before clipping: equal on all ranks; with rule `clock` sharded, of the rank's own part.
  double gradient_norm = 0;
  double residual_norm = 0;  ///< of this rank's residual after the step, without what coding the payload rounded away
  double jaccard = 0;        ///< elements kept now and in the step before, over those kept in either
  double energy_share = 0;   ///< of the squares that this rank sent, what fell on elements kept in the step before too
  /// Seconds of the compute stream by phase. Select includes, where a mask is made from the step's own numbers, the
  /// start of its exchange; the waits are what an exchange took longer than the work it hides behind.
  struct Seconds {
    double select = 0, mask_wait = 0, accumulate = 0, payload_wait = 0, update = 0, parameter_wait = 0;
  } seconds;
};

}  // namespace scape::inline v0
