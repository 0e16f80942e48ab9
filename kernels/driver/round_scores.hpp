// Scorers of rounds on the device, a table of them: what each reads, how a lane is described to its
// kernels, and its launches. They write rows of scores over the slots of lanes, one for each KV
// head at last, of which launches behind them choose survivors.
#pragma once

#include "device/plugin.h"
#include "driver/functions.hpp"
#include "driver/triattention.hpp"
#include "kernels/candidates.hpp"
#include "kernels/normalise.hpp"

namespace kvrt::cuda {

/// Lanes of one kind and scorer, and where their rows are in the workspace.
struct round_share {
    const kvrt_round_lane* lanes = nullptr;
    uint32_t count = 0;
    uint32_t most_slots = 0;
    uint32_t kv_heads = 0;
    uint32_t rows = 1;  ///< of scores, of a KV head
    uint32_t sets = 0;  ///< of survivors
    bool shares_sets = false;
    uint64_t stride = 0;
    kernels::block_place place;

    uint32_t heads() const { return count * kv_heads; }
    uint64_t survivors_at() const { return uint64_t{heads()} * rows * stride; }
};

/// What of a lane depends on where the batch has its parts: places from the batch's begin, each in
/// elements, and of its first row in the workspace.
struct lane_places {
    uint64_t table, phases, row;
};

/// What the launches of a share's scores take. Pointers are the device's.
struct score_call {
    stream_handle stream;
    const kvrt_round& round;
    const round_share& share;
    const std::byte* batch;
    const std::byte* lanes;                ///< as the scorer has described them
    const kernels::normalise_head* heads;  ///< [share.heads()]
    const kernels::guarded_slots* guarded;
    float* scores;

    const kvrt_round_lane& first() const { return *share.lanes; }
};

class round_scores;

struct round_scorer {
    uint32_t scorer;  ///< KV_SCORER_*
    bool reads_keys;
    bool scores_query_heads;  ///< a row for each, before the last
    uint32_t lane_bytes;
    void (*describe)(const kvrt_round_lane& from, const lane_places& at, std::byte* lane);
    status (round_scores::*launch)(const score_call& call);

    uint32_t rows_of(const kvrt_round_scores& scores) const {
        return scores_query_heads ? scores.group : 1;
    }
};

class round_scores {
  public:
    round_scores();
    round_scores(const round_scores&) = delete;
    round_scores& operator=(const round_scores&) = delete;

    /// Of a lane, that any scorer takes.
    static uint32_t most_lane_bytes();
    /// Null where there is none.
    static const round_scorer* find(uint32_t scorer);

    /// Once. Kernels that there are none of are INTERNAL.
    status create(kernel_functions& functions);

    /// UNSUPPORTED, by name, where no kernel scores what is stored so.
    status check(const kvrt_lane& lane, const kernels::block_place& place, uint32_t scorer);

    status launch(const score_call& call);

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
    status find_reader(const score_call& call, key_functions*& reader);
    status score_places(const score_call& call);
    status score_norms(const score_call& call);
    status score_triattention(const score_call& call);
    /// One row of z-scores for each KV head, of those of its query heads.
    status normalise(const score_call& call);

    kernel_functions* functions_ = nullptr;
    triattention_scorer triattention_;
    kernel_function places_, normalise_;
    key_functions readers_[8];
};

}  // namespace kvrt::cuda
