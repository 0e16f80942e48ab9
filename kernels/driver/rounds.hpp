// Rounds of eviction as launches: candidates, scores, survivors, compaction. Lanes of a kind go
// together, as many at once as the workspace has rows for; bundles, whose lanes are of several
// kinds, are scored share by share first, into rows that they have in common. What kernels are told
// of them goes up through a ring of its own, in one batch for the call.
#pragma once

#include "base/checked.hpp"
#include "device/plugin.h"
#include "driver/buffer.hpp"
#include "driver/round_scores.hpp"
#include "driver/staging.hpp"
#include "kernels/open_lanes.hpp"

namespace kvrt::cuda {

inline constexpr uint64_t batch_alignment = 16;    ///< of an array in a batch
inline constexpr uint64_t row_alignment = 64;      ///< slots
inline constexpr uint64_t scratch_alignment = 16;  ///< floats

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
    status check(const kvrt_lane& lane, const kvrt_lane* sealed, uint32_t scorer);
    status check_ranges(const kvrt_lane& lane, const kvrt_lane* sealed);

    /// Room for rows that are opened before they are scored or coded anew; once.
    status create_opened(uint64_t bytes);

    /// What rounds outside of the host's steps are enqueued on.
    stream_handle stream() const { return stream_; }

    status run(stream_handle stream, kvrt_round& round);

    triattention_scorer& triattention() { return scorers_.triattention(); }
    const triattention_scorer& triattention() const { return scorers_.triattention(); }

    /// Waits for what the stream has.
    status read(stream_handle stream, const kvrt_words* pieces, uint64_t count, uint32_t* out);

  private:
    /// The last phases that went into a batch, and where.
    struct phases_in_batch {
        static constexpr uint32_t most = 8;  ///< rotations that lanes of a bundle may take turns in
        const double* of[most] = {};
        uint64_t at[most] = {};
        uint32_t count = 0;

        /// Where they are to be noted, if `missing`, or are noted.
        uint64_t* place_of(const double* phases, bool& missing);
    };
    /// Lanes that have sets in common: what candidates all their heads have, then rows of the sets.
    struct bundle {
        const kvrt_round_lane* lanes = nullptr;
        uint32_t count = 0;
        uint32_t sets = 0;
        uint32_t heads = 0;  ///< of all lanes
        bool reserves = false;
        uint64_t stride = 0;

        uint64_t scores_at() const;
        uint64_t ranges_at() const { return scores_at() + sets * stride; }
        uint64_t survivors_at() const { return ranges_at() + (reserves ? sets * stride : 0); }
        uint64_t end() const { return survivors_at() + sets * stride; }
    };
    /// Places in the batch, in bytes, of what is told of a share.
    struct places {
        uint64_t guards = 0, scores = 0, heads = 0, ranges = 0;
        uint64_t joins = 0, range_joins = 0, observed = 0, unlike = 0, moments = 0, opened = 0;
        uint32_t join_count = 0;
    };
    /// The same of sets of survivors, as they become complete, and of how lanes move.
    struct set_lists {
        uint64_t selects = 0, samples = 0, quotas = 0, reserves = 0, moves = 0, sealed = 0;
        uint64_t counted = 0;  ///< of a bundle whose lanes are counted, by the number of the set
        uint32_t count = 0, sample_count = 0, quota_count = 0, reserve_count = 0;
        uint32_t most_segments = 0, most_sampled = 0;  ///< the latter: slots
        uint32_t lanes = 0;                            ///< that are listed
        // Of a bundle:
        const bundle* of = nullptr;
        bool counts = false;
        uint32_t* begun = nullptr;  ///< [sets]: has scores already
        uint32_t heads = 0;         ///< of the lanes that are listed
    };
    /// Of a set.
    struct set_rows {
        uint64_t scores, ranges, survivors;
    };

    uint64_t batch_bytes(const kvrt_round& round) const;
    uint64_t share_bytes(const round_share& mine, uint64_t heads, uint64_t stride,
                         uint64_t scratch) const;
    uint64_t least_workspace(const kvrt_round_memory& memory) const;
    round_share next_share(const kvrt_round_lane* lanes, uint32_t left, uint64_t room) const;
    bundle bundle_at(const kvrt_round& round, uint32_t first) const;
    status check_bundles(const kvrt_round& round) const;
    status run_share(stream_handle stream, kvrt_round& round);
    status run_bundle(stream_handle stream, kvrt_round& round);
    status copy_from(uint64_t begin, uint64_t end);
    void begin_sets(const kvrt_round_lane* lanes, uint32_t count, uint32_t sets, set_lists& lists);
    places pack(round_share& mine, set_lists& sets);
    void pack_sets(const round_share& mine, const uint64_t* tables, set_lists& sets, places& at);
    void add_set(const round_share& mine, uint32_t lane, uint32_t head, uint64_t table,
                 const set_rows& rows, set_lists& sets);
    /// Which sums of observed attention are whose (round_observed.cpp).
    void pack_observed(const round_share& mine, places& at);
    set_rows rows_of_set(const round_share& mine, const set_lists& sets, uint32_t lane,
                         uint32_t head) const;
    status score(stream_handle stream, const kvrt_round& round, const round_share& mine,
                 const places& at);
    status launch_joins(stream_handle stream, const round_share& mine, const places& at);
    status launch_adjustments(stream_handle stream, const set_lists& sets,
                              kernels::guarded_slots* guarded);
    status launch_sets(stream_handle stream, const set_lists& sets,
                       kernels::guarded_slots* guarded);
    /// What the lanes of a bundle would keep.
    status launch_counts(stream_handle stream, const kvrt_round& round, const bundle& all,
                         const set_lists& sets);
    /// Of the lanes from `first` of the lists on (round_compaction.cpp).
    status launch_compaction(stream_handle stream, const kvrt_round& round, const round_share& mine,
                             const set_lists& sets, uint32_t first, uint64_t survivor_stride);
    status launch_tiles(stream_handle stream, const round_share& mine,
                        const kernels::compact_sealed_parameters& compact);
    status describe_share(round_share& mine) const;
    // Rows of lanes that seal, as scorers read them (round_opened.cpp).
    uint64_t opened_bytes(const kvrt_round_lane& lane) const;
    kernels::opening opening_of(const round_share& mine) const;
    /// The lane's blocks there, from the `first` on: places in the batch, of their table.
    uint64_t pack_opened(const kvrt_round_lane& lane, uint64_t table, uint32_t& first,
                         kernels::open_lane& opened);
    status open_share(stream_handle stream, const round_share& mine, const places& at);
    float* scores() const;
    kernels::guarded_slots* guarded(const round_share& mine) const;

    /// Room in the open batch, and where it is there.
    template <class type>
    type* append(uint64_t count, uint64_t& at) {
        at = round_up(used_, batch_alignment);
        used_ = at + count * sizeof(type);
        return at_host<type>(at);
    }
    template <class type>
    type* at_host(uint64_t at) const {
        return reinterpret_cast<type*>(ring_.data() + at);
    }
    template <class type>
    const type* on_device(uint64_t at) const {
        return reinterpret_cast<const type*>(ring_.on_device(at));
    }

    device_context* device_ = nullptr;
    kernel_functions* functions_ = nullptr;
    stream_handle stream_ = nullptr;
    device_buffer workspace_, opened_;
    uint64_t opened_size_ = 0;
    device_buffer positions_[KVRT_MOST_POSITIONS];
    uint64_t workspace_bytes_ = 0;
    uint32_t* counts_ = nullptr;  ///< pinned
    staging_ring ring_;
    uint64_t used_ = 0;  ///< of the open batch
    phases_in_batch phases_;
    kernel_function candidates_, join_, sample_, quota_, reserve_, select_, compact_,
        compact_sealed_, open_lanes_, open_survivors_, compact_tiles_, share_budgets_,
        count_reaching_;
    round_scores scorers_;
};

}  // namespace kvrt::cuda
