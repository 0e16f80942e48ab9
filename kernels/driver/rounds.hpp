// Rounds of eviction as launches: candidates, scores, survivors, compaction. Lanes of a kind go
// together, as many at once as the workspace has rows for. What kernels are told of them goes up
// through a ring of its own, in one batch for the call.
#pragma once

#include "base/checked.hpp"
#include "device/plugin.h"
#include "driver/buffer.hpp"
#include "driver/functions.hpp"
#include "driver/staging.hpp"
#include "kernels/candidates.hpp"

namespace kvrt::cuda {

inline constexpr uint64_t batch_alignment = 16;  ///< of an array in a batch

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

    /// Waits for what the stream has.
    status read(stream_handle stream, const kvrt_words* pieces, uint64_t count, uint32_t* out);

  private:
    /// Kernels that read keys stored so.
    struct key_functions {
        kernels::coding codes = kernels::coding::plain;
        kernels::number type = kernels::number::f32;
        kernel_function score[3];  ///< of 2, 4 and 8 query heads at once
        kernel_function measure;
    };
    /// Lanes of one kind and scorer, and where their rows are in the workspace.
    struct share {
        const kvrt_round_lane* lanes = nullptr;
        uint32_t count = 0;
        uint32_t most_slots = 0;
        uint32_t kv_heads = 0;
        uint32_t rows = 1;  ///< of scores, of a KV head
        uint32_t sets = 0;  ///< of survivors
        bool shares_sets = false;
        uint64_t stride = 0;
        uint64_t sums_stride = 0;  ///< of what was observed
        kernels::block_place place;

        uint32_t heads() const { return count * kv_heads; }
        uint64_t survivors_at() const { return uint64_t{heads()} * rows * stride; }
    };
    /// Places in the batch, in bytes.
    struct places {
        uint64_t guards, scores, heads, sets, joins, moves, observed;
    };

    key_functions* reader_of(const kernels::operand_place& keys);
    uint64_t batch_bytes(const kvrt_round& round) const;
    uint64_t workspace_bytes(uint64_t heads, uint64_t rows, uint64_t stride) const;
    share next_share(const kvrt_round& round, uint32_t first) const;
    status run_share(stream_handle stream, const kvrt_round& round, share& mine);
    places pack(share& mine);
    status launch_scores(stream_handle stream, const kvrt_round& round, share& mine,
                         const places& at);
    /// Scores from sums of observed attention (round_observed.cpp).
    void pack_observed(const share& mine, places& at);
    status launch_observed(stream_handle stream, const kvrt_round& round, const share& mine,
                           const places& at);
    status launch_rest(stream_handle stream, const kvrt_round& round, const share& mine,
                       const places& at);
    float* scores() const;
    kernels::guarded_slots* guarded(const share& mine) const;

    template <class type>
    type* append(uint64_t count, uint64_t& at) {
        at = round_up(used_, batch_alignment);
        used_ = at + count * sizeof(type);
        return reinterpret_cast<type*>(ring_.data() + at);
    }
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
    kernel_function candidates_, places_, normalise_, pool_, join_, select_, compact_;
    key_functions readers_[8];
};

}  // namespace kvrt::cuda
