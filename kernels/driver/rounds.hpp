// Rounds of eviction as launches: candidates, scores, survivors, compaction. Lanes of a kind go
// together, as many at once as the workspace has rows for. What kernels are told of them goes up
// through a ring of its own, in one batch for the call.
#pragma once

#include "device/plugin.h"
#include "driver/buffer.hpp"
#include "driver/round_scores.hpp"
#include "driver/staging.hpp"

namespace kvrt::cuda {

class round_runner {
  public:
    round_runner();
    round_runner(const round_runner&) = delete;
    round_runner& operator=(const round_runner&) = delete;
    /// Steps in flight have ended.
    ~round_runner();

    /// Once.
    status create(device_context& device, kernel_functions& functions, kvrt_round_memory& memory);

    /// UNSUPPORTED, by name, where no kernel scores or moves what is stored so.
    status check(const kvrt_lane& lane, uint32_t scorer);

    /// What rounds outside of the host's steps are enqueued on.
    stream_handle stream() const { return stream_; }

    status run(stream_handle stream, kvrt_round& round);

    triattention_scorer& triattention() { return scorers_.triattention(); }
    const triattention_scorer& triattention() const { return scorers_.triattention(); }

    /// Waits for what the stream has.
    status read(stream_handle stream, const kvrt_words* pieces, uint64_t count, uint32_t* out);

  private:
    /// Places in the batch, in bytes.
    struct places {
        uint64_t guards, scores, heads, sets, joins, moves;
    };

    uint64_t batch_bytes(const kvrt_round& round) const;
    uint64_t workspace_bytes(uint64_t heads, uint64_t rows, uint64_t stride) const;
    round_share next_share(const kvrt_round& round, uint32_t first) const;
    status run_share(stream_handle stream, const kvrt_round& round, round_share& mine);
    places pack(round_share& mine);
    status launch_rest(stream_handle stream, const round_share& mine, const places& at);
    float* scores() const;
    kernels::guarded_slots* guarded(const round_share& mine) const;

    template <class type>
    type* append(uint64_t count, uint64_t& at);
    template <class type>
    const type* on_device(uint64_t at) const {
        return reinterpret_cast<const type*>(ring_.on_device(at));
    }

    device_context* device_ = nullptr;
    kernel_functions* functions_ = nullptr;
    stream_handle stream_ = nullptr;
    device_buffer workspace_;
    device_buffer positions_[KVRT_MOST_POSITIONS];
    uint64_t workspace_bytes_ = 0;
    staging_ring ring_;
    uint64_t used_ = 0;               ///< of the open batch
    const double* phases_ = nullptr;  ///< the last that went into it, and where
    uint64_t phases_at_ = 0;
    kernel_function candidates_, join_, select_, compact_;
    round_scores scorers_;
};

}  // namespace kvrt::cuda
