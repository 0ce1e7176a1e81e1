#pragma once

#include <scape/bfloat16.hpp>
#include <scape/collective_arguments.hpp>
#include <scape/collective_call.hpp>
#include <scape/communicator.hpp>
#include <scape/error.hpp>
#include <scape/fingerprint.hpp>
#include <scape/host/mean.hpp>
#include <scape/host/stream.hpp>

// Without MPI's C++ bindings of old, which are a library of their own.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace scape::inline v0 {

namespace detail {
template <class S>
concept OtherStream = !std::same_as<S, HostStream>;
}  // namespace detail

struct MpiOptions {
  /// A collective that some rank has not joined, or does not go on with, for so long fails on the ranks that wait in
  /// it.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
  /// Bytes of each of the four staging buffers; 0: 4 MiB, or 16 KiB a rank where that is more, at most 1 GiB.
  std::size_t staging_bytes = 0;
};

/// A Communicator over any MPI_Comm, for host memory: its stream is HostStream.
///
/// MPI must be initialised, with MPI_THREAD_SERIALIZED at least: collectives run in the stream's thread. All calls of
/// all MpiCommunicators take turns. A program that calls MPI itself while they are at work needs MPI_THREAD_MULTIPLE.
///
/// Works on a duplicate of the group, so its messages meet none of the program's. Everything travels through staging
/// buffers, block by block, the next block while one is summed: no count reaches MPI that an int cannot hold, and the
/// caller's buffers are his again when the stream has passed or failed. Sums run in the order of the ranks in float32,
/// each element by itself: the bits are those of ThreadCommunicator, whatever MPI does and however a buffer is cut.
///
/// Ranks that call different collectives, one that leaves (its communicator is destroyed) while others wait, one that
/// fails, and one that does not come within the patience make every rank's stream fail with scape::Error that names the
/// rank, and all later collectives. MPI calls that fail are scape::Error too. A process that dies is a case for mpirun,
/// which ends the job, else for the patience. After an error end with MPI_Abort: MPI_Finalize may wait for the dead.
///
/// Making it is collective. Destroying it waits a second at most for the others to do the same; where they do not, or a
/// collective has failed, the duplicate and the staging buffers stay for good, since MPI may still write there. Must
/// outlive the work enqueued with it, and go before MPI_Finalize.
class MpiCommunicator {
 public:
  explicit MpiCommunicator(MPI_Comm group, const MpiOptions& options = {}) {
    int initialised = 0, between_groups = 0, threads = 0;
    MPI_Initialized(&initialised);
    expects(initialised != 0, "MPI", "not initialised",
            "call MPI_Init_thread first, with MPI_THREAD_SERIALIZED or more");
    MPI_Query_thread(&threads);
    expects(threads >= MPI_THREAD_SERIALIZED, "MPI's thread level", threads,
            "pass MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE to MPI_Init_thread");
    expects(group != MPI_COMM_NULL, "group", "MPI_COMM_NULL", "must be a communicator");
    std::unique_lock lock(mpi_);
    check(MPI_Comm_test_inter(group, &between_groups), "MPI_Comm_test_inter");
    expects(between_groups == 0, "group", "an intercommunicator", "must be one group");
    int rank = 0, size = 1;
    check(MPI_Comm_rank(group, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(group, &size), "MPI_Comm_size");
    rank_ = static_cast<std::size_t>(rank);
    ranks_ = static_cast<std::size_t>(size);
    std::size_t staging = options.staging_bytes;
    if (staging == 0) staging = std::clamp(ranks_ << 14, std::size_t{4} << 20, std::size_t{1} << 30);
    expects(staging <= std::size_t{std::numeric_limits<int>::max()}, "staging_bytes", staging, "must fit an int");
    state_ = std::make_unique<State>(ranks_, std::max<std::size_t>(staging / ranks_ / widest * widest, widest));
    patience_ = options.patience;

    // Not MPI_Comm_dup, which blocks: other communicators of this process must go on, or no rank may ever get here.
    MPI_Request made = MPI_REQUEST_NULL;
    check(MPI_Comm_idup(group, &state_->group, &made), "MPI_Comm_idup");
    lock.unlock();
    try {
      wait(made, [&](auto waited) {
        if (waited >= patience_)
          throw Error("rank " + std::to_string(rank_) + " has waited for " + std::to_string(waited.count()) +
                      " ms for the other ranks' MpiCommunicator");
      });
    } catch (...) {
      static_cast<void>(state_.release());  // MPI writes the handle there when the others come
      throw;
    }
    lock.lock();
    check(MPI_Comm_set_errhandler(state_->group, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    listen();
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  ~MpiCommunicator() {
    if (!leave()) static_cast<void>(state_.release());
  }

  int rank() const noexcept { return static_cast<int>(rank_); }
  int size() const noexcept { return static_cast<int>(ranks_); }

  /// Bytes of this rank's memory that collectives give to other ranks, counted when they are enqueued; without the 32
  /// bytes of each collective by which the ranks find out whether they agree.
  std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }

  /// Makes the group's collectives fail on every rank, also those that wait now: for a rank that cannot go on. From any
  /// thread.
  void abort(const std::string& reason) {
    const std::lock_guard lock(mpi_);
    fail("rank " + std::to_string(rank_) + ": " + reason);
  }

  /// Sends 2 (W - 1) / W * in.size_bytes(): every rank sums one slice of each block, then all gather the slices.
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const HostStream& stream) {
    all_reduce(in, out, stream);
  }
  void all_reduce_mean(std::span<const bfloat16> in, std::span<bfloat16> out, const HostStream& stream) {
    all_reduce(in, out, stream);
  }

  /// Sends (W - 1) / W * in.size_bytes().
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const HostStream& stream) {
    reduce_scatter(in, out, stream);
  }
  void reduce_scatter_mean(std::span<const bfloat16> in, std::span<bfloat16> out, const HostStream& stream) {
    reduce_scatter(in, out, stream);
  }

  /// Sends (W - 1) * own.size_bytes().
  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const HostStream& stream) {
    gather_even(own, all, stream);
  }
  void all_gather(std::span<const bfloat16> own, std::span<bfloat16> all, const HostStream& stream) {
    gather_even(own, all, stream);
  }

  /// Sends (W - 1) * own.size_bytes().
  void all_gather_uneven(std::span<const MaskWord> own, std::span<MaskWord> all, std::span<const std::size_t> counts,
                         const HostStream& stream) {
    detail::expects_all_gather_uneven(own.size(), all.size(), counts, rank_, ranks_);
    Fingerprint print;
    for (const std::size_t count : counts) print.add(std::uint64_t{count});
    gather({Collective::all_gather_uneven, Element::mask_word, all.size(), own.size(), print.value()}, own, all,
           stream);
  }

  /// out = the parts that the ranks have for this one, by rank: in and out hold size() parts of equal size. Not in
  /// place. Sends (W - 1) / W * in.size_bytes().
  void all_to_all(std::span<const MaskWord> in, std::span<MaskWord> out, const HostStream& stream) {
    detail::expects_all_to_all(in.size(), out.size(), ranks_);
    const std::size_t part = in.size() / ranks_;
    bytes_sent_ += (ranks_ - 1) * part * sizeof(MaskWord);
    enqueue(stream, {Collective::all_to_all, Element::mask_word, in.size()}, [this, in, out, part] {
      const std::size_t block = share<MaskWord>();
      const auto size_of = [&](std::size_t i) { return std::min(block, part - i * block); };
      pipeline(
          blocks(part, block),
          [&](Lane& lane, std::size_t i) { send_parts(lane, in.data() + i * block, part, size_of(i)); },
          [&](Lane& lane, std::size_t i) {
            for (std::size_t rank = 0; rank < ranks_; ++rank)
              copy(lane.parts_as<MaskWord>() + rank * size_of(i), out.data() + rank * part + i * block, size_of(i));
          });
    });
  }

  // MPI need not know the memory of devices, so their streams are refused.
  template <class In, class Out, detail::OtherStream S>
  void all_reduce_mean(In&&, Out&&, const S&) = delete;
  template <class In, class Out, detail::OtherStream S>
  void reduce_scatter_mean(In&&, Out&&, const S&) = delete;
  template <class In, class Out, detail::OtherStream S>
  void all_gather(In&&, Out&&, const S&) = delete;
  template <class In, class Out, class Counts, detail::OtherStream S>
  void all_gather_uneven(In&&, Out&&, Counts&&, const S&) = delete;
  template <class In, class Out, detail::OtherStream S>
  void all_to_all(In&&, Out&&, const S&) = delete;

 private:
  using Collective = detail::Collective;
  using Element = detail::Element;
  using Call = detail::CollectiveCall;

  static constexpr std::size_t widest = sizeof(float);  // of the elements that travel
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

  // What ranks tell each other beside the collectives.
  struct Notice {
    enum class Kind : std::uint32_t { waits, leaves, fails } kind = {};
    std::uint64_t collective = 0;  // in which it waits; how many it has finished when it leaves or fails
    std::array<char, 496> reason = {};
  };
  struct Outbox {
    explicit Outbox(std::size_t ranks) : sends(ranks, MPI_REQUEST_NULL) {}
    Notice notice;
    std::vector<MPI_Request> sends;
  };

  // Where each rank's bytes lie in a buffer.
  struct Parts {
    explicit Parts(std::size_t ranks) : sizes(ranks), begins(ranks) {}
    void set(std::size_t rank, std::size_t begin, std::size_t size) {
      begins[rank] = static_cast<int>(begin);
      sizes[rank] = static_cast<int>(size);
    }
    std::vector<int> sizes, begins;
  };

  // One block on its way: `whole` is what leaves and, of a mean, what comes back; `parts` what came from the ranks.
  struct Lane {
    Lane(std::size_t ranks, std::size_t bytes)
        : whole(std::make_unique<std::byte[]>(bytes)),
          parts(std::make_unique<std::byte[]>(bytes)),
          of_whole(ranks),
          of_parts(ranks) {}
    template <class T>
    T* whole_as() const {
      return reinterpret_cast<T*>(whole.get());
    }
    template <class T>
    T* parts_as() const {
      return reinterpret_cast<T*>(parts.get());
    }
    std::unique_ptr<std::byte[]> whole, parts;
    Parts of_whole, of_parts;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  // All that MPI may write to after a failure.
  struct State {
    State(std::size_t ranks, std::size_t share)
        : share(share),
          lanes{Lane(ranks, ranks * share), Lane(ranks, ranks * share)},
          calls(ranks),
          waits_in(ranks, never),
          left_after(ranks, never),
          question(ranks),
          farewell(ranks) {}

    const std::size_t share;  // bytes of a lane's buffer for each rank
    std::array<Lane, 2> lanes;
    MPI_Comm group = MPI_COMM_NULL;
    Call own;
    std::vector<Call> calls;
    std::uint64_t collectives = 0;                    // finished
    std::vector<std::uint64_t> waits_in, left_after;  // by rank, as it told: a collective; how many
    std::uint64_t told = never;                       // the last collective of which this rank has told that it waits
    Notice heard;
    MPI_Request hearing = MPI_REQUEST_NULL;
    Outbox question, farewell;
    std::string broken;
    std::uint64_t broken_at = never;  // earlier collectives have all that they need to end well
  };

  template <class T>
  void all_reduce(std::span<const T> in, std::span<T> out, const HostStream& stream) {
    detail::expects_all_reduce(in.size(), out.size());
    bytes_sent_ += detail::all_reduce_sends(in.size(), rank_, ranks_) * sizeof(T);
    const Call call{Collective::all_reduce_mean, detail::element_of<T>, in.size()};
    enqueue(stream, call, [this, in, out, &pool = stream.pool()] {
      const std::size_t block = share<T>() * ranks_;
      const auto size_of = [&](std::size_t i) { return std::min(block, in.size() - i * block); };
      const auto slice = [&](std::size_t i, std::size_t rank) { return detail::slice_of(size_of(i), ranks_, rank); };
      pipeline(
          blocks(in.size(), block),
          [&](Lane& lane, std::size_t i) {
            copy(in.data() + i * block, lane.whole_as<T>(), size_of(i));
            const std::size_t own = slice(i, rank_).size * sizeof(T);
            for (std::size_t rank = 0; rank < ranks_; ++rank) {
              lane.of_whole.set(rank, slice(i, rank).begin * sizeof(T), slice(i, rank).size * sizeof(T));
              lane.of_parts.set(rank, rank * own, own);
            }
            exchange(lane);
          },
          [&](Lane& lane, std::size_t i) {
            const auto [begin, size] = slice(i, rank_);
            mean_of_parts(lane, lane.whole_as<T>() + begin, size, pool);
            gather(MPI_IN_PLACE, 0, lane.whole.get(), lane.of_whole, lane.request);
          },
          [&](Lane& lane, std::size_t i) { copy(lane.whole_as<T>(), out.data() + i * block, size_of(i)); });
    });
  }

  template <class T>
  void reduce_scatter(std::span<const T> in, std::span<T> out, const HostStream& stream) {
    detail::expects_reduce_scatter(in.size(), out.size(), ranks_);
    bytes_sent_ += (ranks_ - 1) * out.size_bytes();
    const Call call{Collective::reduce_scatter_mean, detail::element_of<T>, in.size()};
    enqueue(stream, call, [this, in, out, &pool = stream.pool()] {
      const std::size_t block = share<T>();
      const auto size_of = [&](std::size_t i) { return std::min(block, out.size() - i * block); };
      pipeline(
          blocks(out.size(), block),
          [&](Lane& lane, std::size_t i) { send_parts(lane, in.data() + i * block, out.size(), size_of(i)); },
          [&](Lane& lane, std::size_t i) { mean_of_parts(lane, out.data() + i * block, size_of(i), pool); });
    });
  }

  template <class T>
  void gather_even(std::span<const T> own, std::span<T> all, const HostStream& stream) {
    detail::expects_all_gather(own.size(), all.size(), ranks_);
    gather({Collective::all_gather, detail::element_of<T>, all.size(), own.size()}, own, all, stream);
  }

  // How much is whose, the ranks' calls tell: counts is of the caller.
  template <class T>
  void gather(const Call& call, std::span<const T> own, std::span<T> all, const HostStream& stream) {
    bytes_sent_ += (ranks_ - 1) * own.size_bytes();
    enqueue(stream, call, [this, own, all] {
      const std::vector<Call>& calls = state_->calls;
      const std::size_t block = share<T>();
      const auto size_of = [&](std::size_t i, std::size_t rank) {
        const std::size_t count = calls[rank].own;
        return std::min(block, count - std::min(count, i * block));
      };
      const auto longest =
          std::max_element(calls.begin(), calls.end(), [](const Call& a, const Call& b) { return a.own < b.own; });
      pipeline(
          blocks(longest->own, block),
          [&](Lane& lane, std::size_t i) {
            const std::size_t size = size_of(i, rank_);
            copy(own.data() + i * block, lane.whole_as<T>(), size);
            for (std::size_t rank = 0; rank < ranks_; ++rank)
              lane.of_parts.set(rank, rank * block * sizeof(T), size_of(i, rank) * sizeof(T));
            gather(lane.whole.get(), size * sizeof(T), lane.parts.get(), lane.of_parts, lane.request);
          },
          [&](Lane& lane, std::size_t i) {
            T* to = all.data() + i * block;
            for (std::size_t rank = 0; rank < ranks_; to += calls[rank++].own)
              copy(lane.parts_as<T>() + rank * block, to, size_of(i, rank));
          });
    });
  }

  template <class F>
  void enqueue(const HostStream& stream, const Call& call, F exchange_blocks) {
    stream.enqueue([this, call, exchange_blocks] {
      try {
        join(call);
        exchange_blocks();
      } catch (const Error& error) {
        give_up(error.what());
        throw;
      } catch (...) {
        give_up("rank " + std::to_string(rank_) + " failed in a collective");
        throw;
      }
      const std::lock_guard lock(mpi_);
      ++state_->collectives;
    });
  }

  void give_up(const std::string& reason) {
    const std::lock_guard lock(mpi_);
    fail(reason);
  }

  // Returns when all ranks are here; throws on all unless they make the same call.
  void join(const Call& call) {
    State& state = *state_;
    MPI_Request request = MPI_REQUEST_NULL;
    state.own = call;
    {
      const std::lock_guard lock(mpi_);
      hear();
      if (state.broken_at != never) throw Error(state.broken);
      check(MPI_Iallgather(&state.own, sizeof(Call), MPI_BYTE, state.calls.data(), sizeof(Call), MPI_BYTE, state.group,
                           &request),
            "MPI_Iallgather");
    }
    wait(request, [&](auto waited) {
      look_around();
      tell_that_it_waits(waited);
      if (waited < patience_) return;
      std::string missing;
      std::size_t here = ranks_;
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (rank == rank_ || state.waits_in[rank] == state.collectives) continue;
        missing += ", rank " + std::to_string(rank) + " did not";
        --here;
      }
      throw Error(waited_in_vain() + ": only " + std::to_string(here) + " of " + std::to_string(ranks_) +
                  " ranks came" + missing);
    });
    detail::check_calls(state.calls, state.collectives);
  }

  // Waits for a lane's request.
  void arrive(Lane& lane) {
    wait(lane.request, [&](auto waited) {
      look_around();
      if (waited >= patience_) throw Error(waited_in_vain() + ": all ranks came, but some rank's part did not");
    });
  }

  // The blocks of a collective, two on their way at a time: start(lane, i), turn(lane, i) when that has arrived, finish
  // when that has; turn may be left out. Ranks make their calls of MPI in the same order, whatever arrives first.
  template <class Start, class Turn, class Finish>
  void pipeline(std::size_t blocks, Start start, Turn turn, Finish finish) {
    std::array<Lane, 2>& lanes = state_->lanes;
    for (std::size_t i = 0; i < blocks + 2; ++i) {
      if (i >= 2) {
        arrive(lanes[i % 2]);
        finish(lanes[i % 2], i - 2);
      }
      if (i < blocks) start(lanes[i % 2], i);
      if constexpr (!std::same_as<Turn, std::nullptr_t>) {
        if (i == 0 || i > blocks) continue;
        arrive(lanes[(i - 1) % 2]);
        turn(lanes[(i - 1) % 2], i - 1);
      }
    }
  }
  template <class Start, class Finish>
  void pipeline(std::size_t blocks, Start start, Finish finish) {
    pipeline(blocks, start, nullptr, finish);
  }

  // Elements of a block for each rank.
  template <class T>
  std::size_t share() const noexcept {
    return state_->share / sizeof(T);
  }
  static std::size_t blocks(std::size_t count, std::size_t block) { return count / block + (count % block != 0); }

  template <class T>
  static void copy(const T* from, T* to, std::size_t count) {
    if (count != 0) std::memcpy(to, from, count * sizeof(T));
  }

  template <class T>
  void mean_of_parts(const Lane& lane, T* out, std::size_t count, HostPool& pool) const {
    const auto part = [&](std::size_t rank) { return lane.parts_as<const T>() + rank * count; };
    detail::mean_in_rank_order(ranks_, part, out, count, pool);
  }

  void exchange(Lane& lane) {
    const std::lock_guard lock(mpi_);
    check(MPI_Ialltoallv(lane.whole.get(), lane.of_whole.sizes.data(), lane.of_whole.begins.data(), MPI_BYTE,
                         lane.parts.get(), lane.of_parts.sizes.data(), lane.of_parts.begins.data(), MPI_BYTE,
                         state_->group, &lane.request),
          "MPI_Ialltoallv");
  }
  // To every rank `size` values of its part of the input; the parts are `stride` apart.
  template <class T>
  void send_parts(Lane& lane, const T* in, std::size_t stride, std::size_t size) {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      copy(in + rank * stride, lane.whole_as<T>() + rank * size, size);
      lane.of_whole.set(rank, rank * size * sizeof(T), size * sizeof(T));
      lane.of_parts.set(rank, rank * size * sizeof(T), size * sizeof(T));
    }
    exchange(lane);
  }
  void gather(const void* own, std::size_t bytes, std::byte* all, const Parts& parts, MPI_Request& request) {
    const std::lock_guard lock(mpi_);
    check(MPI_Iallgatherv(own, static_cast<int>(bytes), MPI_BYTE, all, parts.sizes.data(), parts.begins.data(),
                          MPI_BYTE, state_->group, &request),
          "MPI_Iallgatherv");
  }

  // Until the request is done calls idle(milliseconds waited), which may throw, and leaves the core to others.
  template <class F>
  void wait(MPI_Request& request, F idle) {
    const auto begin = std::chrono::steady_clock::now();
    for (int turn = 0;; ++turn) {
      {
        const std::lock_guard lock(mpi_);
        int done = 0;
        check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        if (done) return;
        idle(std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin));
      }
      pause(turn);
    }
  }
  static void pause(int turn) {
    constexpr int yields = 200, longest = 100;
    if (turn < yields)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(turn - yields + 1, longest)));
  }

  // Says goodbye, and waits a while for that of the others; whether nothing is on its way any longer.
  bool leave() noexcept try {
    State& state = *state_;
    int finalised = 0;
    MPI_Finalized(&finalised);
    if (finalised) return false;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    bool told = false, all_told = false;
    for (int turn = 0; !all_told && std::chrono::steady_clock::now() < end; pause(turn++)) {
      const std::lock_guard lock(mpi_);
      hear();
      if (state.broken_at != never) break;
      if (!told) {
        state.farewell.notice = {Notice::Kind::leaves, state.collectives, {}};
        send(state.farewell);
        told = true;
      }
      const auto here = std::count(state.left_after.begin(), state.left_after.end(), never);
      all_told = here == 1 && sent(state.farewell) && sent(state.question);
    }
    const std::lock_guard lock(mpi_);
    check(MPI_Cancel(&state.hearing), "MPI_Cancel");
    check(MPI_Wait(&state.hearing, MPI_STATUS_IGNORE), "MPI_Wait");
    if (all_told) check(MPI_Comm_free(&state.group), "MPI_Comm_free");  // collective by name, local in effect
    return all_told;
  } catch (const Error&) {
    return false;
  }

  // What follows is called with the mutex held.

  void listen() {
    check(MPI_Irecv(&state_->heard, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, tag, state_->group, &state_->hearing),
          "MPI_Irecv");
  }
  // Takes in all notices that have arrived.
  void hear() {
    State& state = *state_;
    while (true) {
      int done = 0;
      MPI_Status status;
      check(MPI_Test(&state.hearing, &done, &status), "MPI_Test");
      if (!done) return;
      const std::size_t rank = static_cast<std::size_t>(status.MPI_SOURCE);
      const Notice& notice = state.heard;
      switch (notice.kind) {
        case Notice::Kind::waits:
          state.waits_in[rank] = notice.collective;
          break;
        case Notice::Kind::leaves:
          state.left_after[rank] = notice.collective;
          break;
        case Notice::Kind::fails:
          if (notice.collective >= state.broken_at) break;
          state.broken = notice.reason.data();
          state.broken_at = notice.collective;
      }
      listen();
    }
  }
  // Throws where the others will not go on with this collective.
  void look_around() {
    hear();
    const State& state = *state_;
    if (state.broken_at <= state.collectives) throw Error(state.broken);
    const auto gone = std::find_if(state.left_after.begin(), state.left_after.end(),
                                   [&](std::uint64_t finished) { return finished <= state.collectives; });
    if (gone != state.left_after.end())
      throw Error("rank " + std::to_string(gone - state.left_after.begin()) + " left the group while rank " +
                  std::to_string(rank_) + " waits in " + collective());
  }

  void send(Outbox& outbox) {
    for (std::size_t rank = 0; rank < ranks_; ++rank)
      if (rank != rank_)
        check(MPI_Isend(&outbox.notice, sizeof(Notice), MPI_BYTE, static_cast<int>(rank), tag, state_->group,
                        &outbox.sends[rank]),
              "MPI_Isend");
  }
  static bool sent(Outbox& outbox) {
    int done = 0;
    check(MPI_Testall(static_cast<int>(outbox.sends.size()), outbox.sends.data(), &done, MPI_STATUSES_IGNORE),
          "MPI_Testall");
    return done != 0;
  }

  // So that ranks whose patience ends can name those that did not come: once half of it is over, or others ask.
  void tell_that_it_waits(std::chrono::milliseconds waited) {
    State& state = *state_;
    const bool asked =
        std::find(state.waits_in.begin(), state.waits_in.end(), state.collectives) != state.waits_in.end();
    if (state.told == state.collectives || (waited < patience_ / 2 && !asked) || !sent(state.question)) return;
    state.question.notice = {Notice::Kind::waits, state.collectives, {}};
    send(state.question);
    state.told = state.collectives;
  }

  // The group is of no use any longer; the first reason counts.
  void fail(const std::string& reason) {
    State& state = *state_;
    if (state.broken_at != never) return;
    state.broken = reason;
    state.broken_at = state.collectives;
    Notice& notice = state.farewell.notice;
    notice = {Notice::Kind::fails, state.collectives, {}};
    reason.copy(notice.reason.data(), notice.reason.size() - 1);
    try {
      send(state.farewell);
    } catch (const Error&) {  // those that do not hear it have their patience
    }
  }

  std::string collective() const {
    return name_of(state_->own.collective) + ", collective " + std::to_string(state_->collectives);
  }
  std::string waited_in_vain() const {
    return "rank " + std::to_string(rank_) + " has waited for " + std::to_string(patience_.count()) + " ms in " +
           collective();
  }

  static void check(int result, const char* call) {
    if (result == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text = {};
    int length = 0;
    MPI_Error_string(result, text.data(), &length);
    throw Error(std::string(call) + ": " + text.data());
  }

  static constexpr int tag = 0;
  inline static std::mutex mpi_;  // MPI_THREAD_SERIALIZED: one thread of the process at a time

  std::size_t rank_ = 0, ranks_ = 1;
  std::chrono::milliseconds patience_ = {};
  std::unique_ptr<State> state_;
  std::uint64_t bytes_sent_ = 0;
};
static_assert(UnevenCommunicator<MpiCommunicator, HostStream>);
static_assert(AllToAllCommunicator<MpiCommunicator, HostStream>);

}  // namespace scape::inline v0
