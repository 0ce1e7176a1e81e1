#pragma once

#include <concepts>

namespace scape::inline v0 {

/// An ordered queue of work: a cheap handle, copied freely. The stream's type is the backend: the components call free
/// functions (select_top, accumulate, update ...) that are overloaded on it, those of HostStream in host/.
template <class S>
concept Stream = std::copyable<S> && requires(const S& stream, typename S::Event& event) {
  requires std::default_initializable<typename S::Event>;
  // The event now stands for all that was enqueued so far; an event that was never recorded is always past.
  stream.record(event);
  // Work enqueued later runs after the event, or after all that the argument holds now. Does not block the caller.
  stream.wait_for(event);
  stream.wait_for(stream);
  // Blocks the calling thread until the queue is empty; throws what the work threw.
  stream.synchronize();
};

}  // namespace scape::inline v0
