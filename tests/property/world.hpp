// A pool and its oracle, driven together: every operation calls the library, works out what must
// come of it, and compares: status, reports, lengths, blocks per class, accounting. Any difference
// is thrown as a mismatch.
//
//   world.cpp        sequences: create, fork, truncate, release, pins, policies
//   world_step.cpp   steps: append to cancel
//   world_round.cpp  compaction by hand and at step end
//   world_observed.cpp  what attention gave each token
//   world_check.cpp  the checks
//   content.cpp      keys, values, queries; attention and stored bytes against the oracle
#pragma once

#include <random>

#include "mismatch.hpp"
#include "oracle_observed.hpp"
#include "oracle_retention.hpp"

namespace property {

/// What keys and values hold. Fingerprints are small integers that every format keeps exactly: they
/// name tenant, writer, position, lane, head, dimension, and the token itself.
enum class content { fingerprints, real_numbers };

struct lane_undo {
    std::size_t blocks_before = 0;
    block_reference replaced;  // a shared tail that was copied
};

struct world_item {
    oracle_sequence* owner = nullptr;
    uint32_t rows = 0;
    uint32_t accepted = 0;
    std::vector<token> tokens;
    std::vector<lane_undo> undo;  // by lane, once reserved
    uint64_t fence_before = 0;
};

struct world_step {
    kv_step* handle = nullptr;
    uint64_t number = 0;
    bool reserved = false;
    bool written = false;
    bool exported = false;
    uint64_t begun_at = 0;  // operations of the world then
    uint64_t own = 0;       // of those since, this step's
    kv_pool_stats at_begin = {};
    std::vector<world_item> items;

    bool open() const { return handle != nullptr; }
    uint32_t rows() const;
};

struct attention_sample {
    uint32_t rows = 2;   // per item; 0: all
    uint32_t heads = 2;  // per row; 0: all
    bool bytes = false;  // compare stored numbers too
    uint32_t out_type = KV_DTYPE_F32;
};

class world {
  public:
    world(const pool_spec& spec, content filling, uint64_t seed, mutation defect = mutation::none,
          const kv_hooks* hooks = nullptr);
    ~world();
    world(const world&) = delete;
    world& operator=(const world&) = delete;

    // Sequences. A null result is KV_LIMIT, which was right.
    oracle_sequence* create(const kv_policy* policy = nullptr, bool gathers = false);
    void release(oracle_sequence& target);
    std::vector<oracle_sequence*> fork(oracle_sequence& parent, uint32_t count);
    kv_status truncate(oracle_sequence& target, uint64_t tokens_seen);
    void set_policy(oracle_sequence& target, const kv_policy* policy);
    /// The host's scores of one layer, drawn at random.
    kv_status set_scores(oracle_sequence& target, uint32_t layer, uint64_t first, uint64_t tokens);
    void pin(oracle_sequence& target, uint64_t first, uint64_t count);
    void unpin(oracle_sequence& target);

    // Steps, by place (0 or 1).
    int begin();  // -1: two are open
    kv_status append(int place, oracle_sequence& owner, uint32_t rows);
    kv_status remove(int place, oracle_sequence& owner);
    kv_status reserve(int place);
    void accept(int place, oracle_sequence& owner, uint32_t count);
    /// Writes all lanes, and attends over all layers when `sample` is given.
    void forward(int place, const attention_sample* sample);
    void end(int place);
    void cancel(int place);
    void pass_fences();

    kv_status compress(oracle_sequence& target, const kv_policy* policy);
    /// A round that leaves each lane with another number of tokens, drawn at random: through the
    /// core's own interface, as allocators of budgets run it. `policy` selects per layer and head.
    void compress_unevenly(oracle_sequence& target, const kv_policy& policy);

    // Checks.
    void check_accounting();  // runs after every operation
    void check_sequence(const oracle_sequence& target);
    void check_all();
    void check_pool();  // kv_pool_check
    /// A call that fails must change nothing.
    void expect_error(kv_status found, kv_status expected, const char* call);

    kv_pool_stats stats() const;
    oracle& model() { return model_; }
    kv_pool* pool() const { return pool_; }
    const std::vector<std::unique_ptr<oracle_sequence>>& sequences() const { return sequences_; }
    std::vector<oracle_sequence*> alive() const;
    world_step& step(int place) { return steps_[place]; }
    uint64_t operations() const { return operations_; }
    uint64_t attention_rows() const { return attention_rows_; }
    uint64_t bytes_compared() const { return bytes_compared_; }
    uint64_t scored_rounds() const { return scored_rounds_; }
    std::mt19937_64& random() { return random_; }
    /// The last operations, oldest first, one a line.
    std::string trail() const;
    uint64_t below(uint64_t bound) { return random_() % bound; }

  private:
    template <class... arguments>
    void note(fmt::format_string<const arguments&...> text, const arguments&... values) {
        trail_[noted_++ % trail_.size()] =
            fmt::vformat(static_cast<fmt::string_view>(text), fmt::make_format_args(values...));
    }
    void operated();  // counts an operation and checks the accounting
    void bury();      // forgets sequences that are gone
    void grow(world_step& step, world_item& item);
    void undo(const world_step& step, world_item& item);
    void close(world_step& step);
    void cancelled(world_step& step);
    kv_status predict(world_step& step, kv_reserve_report& expected,
                      std::vector<kv_status>& statuses) const;
    void settle(world_step& step, world_item& item, kv_step_report& expected);
    void round_at_step_end(oracle_sequence& owner, uint32_t accepted, kv_step_report& expected);
    survivor_sets read_survivors(const oracle_sequence& owner);
    means_reader read_means(const oracle_sequence& owner);
    bool has_means(const oracle_sequence& owner, const round_plan& plan);
    /// Why a round cannot see what its scorer needs: KV_COMPRESS_NO_*, or 0.
    uint32_t blindness(const oracle_sequence& owner, const kv_policy& policy,
                       const round_plan& plan);
    kv_status compress_by_allocator(oracle_sequence& target, const kv_policy& used, kv_status found,
                                    const kv_compress_report& report);
    round_plan plan_of_survivors(const oracle_sequence& owner, const kv_policy& policy,
                                 const survivor_sets& survivors) const;
    uint32_t places_left() const;
    /// Adds the attention of an item's rows to what the open step leaves.
    void observe(const world_item& item, uint32_t layer, const float* queries);
    void check_observed(const oracle_sequence& target);
    bool has_room(const round_plan& plan) const;
    kv_compress_report run_round(oracle_sequence& owner, const kv_policy& policy,
                                 const round_plan& plan);
    void write_token(world_step& step, world_item& item, uint32_t row, float* numbers);
    void overwrite_sharers(const world_item& item);
    void attend_layer(world_step& step, uint32_t layer, const attention_sample& sample);
    void compare_row(const world_step& step, const world_item& item, uint32_t row, uint32_t layer,
                     uint32_t head, const float* query, const double* out, double log_sum,
                     double tolerance);
    void compare_bytes(world_step& step, uint32_t layer, uint32_t lane);

    oracle model_;
    content filling_;
    kv_pool* pool_ = nullptr;
    std::mt19937_64 random_;
    std::vector<std::unique_ptr<oracle_sequence>> sequences_;
    world_step steps_[2];
    uint64_t tenant_ = 0;
    uint32_t next_serial_ = 1;
    uint64_t next_token_ = 1;
    std::array<std::string, 12> trail_;
    uint64_t noted_ = 0;
    uint64_t operations_ = 0;
    uint64_t attention_rows_ = 0;
    uint64_t bytes_compared_ = 0;
    uint64_t scored_rounds_ = 0;
};

}  // namespace property
