// Scorers of rounds on the device, a table of them: what each reads, how a lane is described to its
// kernels, and its launches (score_content.cpp has those of content). They write rows of scores
// over the slots of lanes, one for each KV head at last, of which launches behind them choose
// survivors.
#pragma once

#include "device/plugin.h"
#include "driver/functions.hpp"
#include "driver/triattention.hpp"
#include "kernels/candidates.hpp"
#include "kernels/gather_queries.hpp"
#include "kernels/normalise.hpp"
#include "kernels/pool.hpp"
#include "kernels/score.hpp"

namespace kvrt::cuda {

/// Lanes of one kind and scorer, and where they are in the workspace, which is counted in floats.
struct round_share {
    const kvrt_round_lane* lanes = nullptr;
    uint32_t count = 0;
    uint32_t most_slots = 0;
    uint32_t kv_heads = 0;
    uint32_t rows = 1;         ///< of scores, of a KV head
    bool shares_sets = false;  ///< all heads of a lane have one
    bool reserves = false;     ///< by ranges of values, which have a row of each head, too
    bool gathers = false;      ///< moments of some lanes are made first
    bool opens = false;        ///< rows are opened first, of lanes that seal
    uint64_t stride = 0;
    uint64_t first = 0;  ///< where its rows begin
    uint64_t guarded_at = 0, scratch_at = 0;
    uint64_t sums_stride = 0;        ///< of what was observed
    uint64_t scratch = 0;            ///< of a KV head
    const float* moments = nullptr;  ///< of the device: the least of its lanes'
    kernels::block_place place;
    kernels::block_place sealed;  ///< of blocks that are sealed, if lanes->sealed
    kernels::block_place read;    ///< of what scorers read: place, or opened rows

    uint32_t heads() const { return count * kv_heads; }
    /// In a KV head's scratch: the row of what was observed, where that is no score yet. The one
    /// before is of key directions.
    uint64_t apart_at() const { return scratch - stride; }
    uint64_t ranges_at() const { return first + uint64_t{heads()} * rows * stride; }
    uint64_t survivors_at() const {
        return ranges_at() + (reserves ? uint64_t{heads()} * stride : 0);
    }
};

/// What of a lane depends on where the batch has its parts: places from the batch's begin, each in
/// elements, of its first row in the workspace, and of its moments behind those of the share.
struct lane_places {
    uint64_t table, phases, row, moments;
};

/// What the launches of a share's scores take. Pointers are the device's.
struct score_call {
    stream_handle stream;
    const kvrt_round& round;
    const round_share& share;
    const std::byte* batch;
    const std::byte* lanes;                ///< as the scorer has described them
    const kernels::normalise_head* heads;  ///< [share.heads()]
    const kernels::moments_lane* moments;  ///< [share.count]
    const kernels::guarded_slots* guarded;
    float* scores;
    float* scratch;                         ///< [share.heads()][share.scratch], on 64 bytes
    const kernels::pool_row* observed;      ///< [share.heads()], of scorers that go by it
    const kernels::normalise_head* unlike;  ///< [share.heads()], of BLEND
    const std::byte* rows;                  ///< the arena of share.read

    const kvrt_round_lane& first() const { return *share.lanes; }
    template <class type>
    const type* lanes_of() const {
        return reinterpret_cast<const type*>(lanes);
    }
    template <class type>
    const type* batch_of() const {
        return reinterpret_cast<const type*>(batch);
    }
    uint32_t score_blocks() const {
        return kernels::score_blocks(share.count, share.kv_heads, share.most_slots);
    }
};

/// What the parameters of all kernels of content begin with.
template <class parameters>
parameters begin_parameters(const score_call& call) {
    parameters made;
    made.arena = call.rows;
    made.place = call.share.read;
    made.tables = call.batch_of<uint32_t>();
    made.scores = call.scores;
    made.count = call.share.count;
    made.most_slots = call.share.most_slots;
    return made;
}

class round_scores;

/// What a scorer reads of lanes: nothing, keys by kernels for their format, or rows that one kernel
/// opens.
enum class lane_reads : uint32_t { nothing, keys_by_format, keys, keys_and_values };

/// Floats that launches for a KV head of so many slots work in, with rows of `stride` floats and at
/// most so many channels.
using scratch_size = uint64_t (*)(uint32_t dim, uint64_t stride);

struct round_scorer {
    uint32_t scorer;  ///< KV_SCORER_*
    lane_reads reads;
    bool scores_query_heads;  ///< a row for each, before the last
    uint32_t lane_bytes;
    void (*describe)(const kvrt_round_lane& from, const lane_places& at, std::byte* lane);
    status (round_scores::*launch)(const score_call& call);
    scratch_size scratch = nullptr;  ///< null: none
    bool observes_apart = false;     ///< what was observed goes to round_share::apart_at

    uint32_t rows_of(const kvrt_round_scores& scores) const {
        return scores_query_heads ? scores.group : 1;
    }
    uint64_t scratch_of(uint32_t dim, uint64_t stride) const {
        return scratch == nullptr ? 0 : scratch(dim, stride);
    }
};

class round_scores {
  public:
    round_scores();
    round_scores(const round_scores&) = delete;
    round_scores& operator=(const round_scores&) = delete;

    /// Of a lane, that any scorer takes.
    static uint32_t most_lane_bytes();
    static uint64_t most_scratch(uint32_t dim, uint64_t stride);
    /// Null where there is none.
    static const round_scorer* find(uint32_t scorer);

    /// Once. Kernels that there are none of are INTERNAL.
    status create(kernel_functions& functions);

    /// UNSUPPORTED, by name, where no kernel scores what is stored so.
    status check(const kvrt_lane& lane, const kernels::block_place& place, uint32_t scorer);

    /// The same of a layout of a lane that seals, whose rows are opened first.
    status check_opened(const kvrt_lane& lane, const kernels::block_place& place, uint32_t scorer);

    /// The same of values whose ranges are measured.
    status check_ranges(const kvrt_lane& lane, const kernels::block_place& place);

    status launch(const score_call& call);
    /// VaSE's ranges of values, a row for each KV head.
    status measure_ranges(const score_call& call, const kernels::score_lane* lanes);

    triattention_scorer& triattention() { return triattention_; }
    const triattention_scorer& triattention() const { return triattention_; }

  private:
    /// Kernels that read keys stored so.
    struct key_functions {
        kernels::coding codes = kernels::coding::plain;
        kernels::number type = kernels::number::f32;
        kernel_function score[3];  ///< of 2, 4 and 8 query heads at once
        kernel_function measure;
        kernel_function gather;  ///< in front of matrix products
    };
    static const round_scorer scorers[];

    key_functions* reader_of(const kernels::operand_place& keys);
    status make_moments(const score_call& call);
    status find_reader(const score_call& call, key_functions*& reader);
    status score_places(const score_call& call);
    status score_norms(const score_call& call);
    status score_triattention(const score_call& call);
    status score_directions(const score_call& call);
    status score_lag(const score_call& call);
    status score_sketch(const score_call& call);
    status score_expected(const score_call& call);
    status score_observed(const score_call& call);
    static uint64_t direction_scratch(uint32_t dim, uint64_t stride);
    static uint64_t blend_scratch(uint32_t dim, uint64_t stride);
    static uint64_t redundancy_scratch(uint32_t dim, uint64_t stride);
    status score_blend(const score_call& call);
    status score_redundancy(const score_call& call);
    status score_similar(const score_call& call);
    /// One row of z-scores for each KV head, of those of `group` rows.
    status normalise(const score_call& call, const kernels::normalise_head* heads, uint32_t group);

    kernel_functions* functions_ = nullptr;
    triattention_scorer triattention_;
    kernel_function places_, normalise_, pool_, moments_, sum_directions_, score_directions_,
        compare_keys_, spare_newest_, deviations_, ranks_, draw_sketches_, score_sketches_,
        expected_, soften_, share_, blend_, mix_;
    key_functions readers_[8];
};

}  // namespace kvrt::cuda
