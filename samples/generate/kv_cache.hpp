// The engine's side of libkvrt: a pool for a model, its sequences, and one step at a time as an
// object that attention can be asked of. Nothing here knows how keys and values are stored. The
// pool is on the CPU, or on a GPU: then rows go there layer by layer, and outputs come back.
//
//     cache.begin(items) -> forward_pass::run(batch, cache, logits) -> cache.end()
//
// A step that is not ended is cancelled when the object goes or the next one begins.
#pragma once

#include <kvrt/kvrt.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cuda_driver.hpp"
#include "llama.hpp"
#include "outcome.hpp"

namespace generate {

struct operand_storage {
    std::uint32_t format = KV_FORMAT_F16;
    std::uint32_t flags = 0;  // KV_STORAGE_*
};

// Of a layer's keys before rotation, [kv_heads, head_dim] each.
struct channel_constants {
    std::vector<float> means;
    std::vector<float> scales;
};

// Of a layer's queries before rotation, [query_heads, bands] each (kv_query_statistics).
struct query_statistics {
    std::uint64_t tokens = 0;
    std::vector<float> mean_real;
    std::vector<float> mean_imaginary;
    std::vector<float> mean_magnitude;
};

// Whether keys stored so need constants of their channels.
inline bool takes_key_channels(const operand_storage& keys) {
    return keys.format == KV_FORMAT_AFFINE4;
}

struct layer_storage {
    operand_storage keys;
    operand_storage values;
};

struct cache_options {
    std::vector<layer_storage> storage{1};        // one a layer, or a single one for all of them
    std::vector<channel_constants> key_channels;  // one a layer, where keys take them
    std::uint32_t preset = 0;                     // KV_PRESET_*, over `storage`; 0: none
    std::uint32_t most_sequences = 1;
    std::uint32_t most_tokens = 0;     // retained by one sequence
    std::uint32_t most_step_rows = 0;  // in one step
    std::uint32_t threads = 0;         // 0: one per processor
    std::uint32_t most_observed = 0;   // sequences whose policies need observed attention
    bool lane_per_head = false;        // heads of a layer may retain different numbers of tokens
    std::uint32_t demoted_format = 0;  // of blocks behind the newest tokens, rotated; 0: as others
    std::uint32_t demote_after = 0;    // so many
    bool cache_positions = false;      // the library rotates, by places in the cache
    bool on_gpu = false;               // the pool is on the first CUDA device
};

// What a layer hands over and where it wants the result, [rows, heads, dim] each, on the device
// that the pool is on.
struct attention_tensors {
    kv_tensor queries;
    kv_tensor keys;
    kv_tensor values;
    kv_tensor out;
};

class kv_cache : public attention_cache {
  public:
    static outcome<kv_cache> create(const llama_config& config, const cache_options& options);

    kv_cache(kv_cache&& other) noexcept;
    kv_cache& operator=(kv_cache&&) = delete;
    ~kv_cache() override;

    // `policy` may be NULL: keep everything. `flags` are KV_SEQ_*.
    outcome<kv_seq> create_sequence(const kv_policy* policy, std::uint32_t flags = 0);
    outcome<nothing> release_sequence(kv_seq sequence);
    // Sequences that begin with all that `parent` has read. Nothing is copied for that.
    outcome<std::vector<kv_seq>> fork(kv_seq parent, std::size_t count);
    // What was observed for the policy before stays where the new one wants the same.
    outcome<nothing> set_policy(kv_seq sequence, const kv_policy& policy);
    // A round of the sequence's policy, now.
    outcome<kv_compress_report> compress(kv_seq sequence);

    struct item {
        kv_seq sequence;
        std::span<const token_id> tokens;
    };

    // Opens a step and reserves room for all tokens of all items, whose rows follow each other.
    // Returns the position of each row, valid until the next begin.
    outcome<std::span<const std::uint32_t>> begin(std::span<const item> items);
    outcome<nothing> attend(std::uint32_t layer, const attention_rows& rows) override;
    bool rotates() const override { return rotates_; }
    outcome<nothing> attend(std::uint32_t layer, const attention_tensors& tensors);
    // Of the open step, the first `count` tokens of the sequence stay; without it, all do.
    outcome<nothing> accept(kv_seq sequence, std::size_t count);
    outcome<kv_step_report> end();

    // Of a token of a long sequence, in all layers.
    std::uint64_t bytes_per_token() const { return bytes_per_token_; }
    outcome<kv_pool_stats> statistics() const;
    outcome<kv_seq_info> info(kv_seq sequence) const;
    // Measured on all keys of the layer that the sequence holds.
    outcome<channel_constants> fit_keys(kv_seq sequence, std::uint32_t layer) const;
    outcome<std::uint64_t> retained(kv_seq sequence, std::uint32_t layer) const;
    // What a sequence has gathered of its queries, and what serves all sequences of the cache.
    outcome<query_statistics> gathered(kv_seq sequence, std::uint32_t layer) const;
    outcome<nothing> set_statistics(std::uint32_t layer, query_statistics& statistics);

  private:
    struct pool_release {
        void operator()(kv_pool* pool) const { kv_pool_release(pool); }
    };

    kv_cache() = default;
    void cancel();
    outcome<nothing> create_gpu_rows(const llama_config& config, std::size_t most_rows);
    outcome<nothing> reserve();
    outcome<nothing> attend_on_gpu(std::uint32_t layer, const attention_rows& rows);

    // Of a pool on a GPU, which is gone before they are.
    std::unique_ptr<cuda_device> gpu_;
    std::optional<device_rows> gpu_packed_;  // queries, keys and values of a layer
    std::optional<device_rows> gpu_out_;
    std::unique_ptr<kv_pool, pool_release> pool_;
    kv_step* step_ = nullptr;
    std::vector<std::uint32_t> positions_;
    std::uint32_t query_heads_ = 0;
    std::uint32_t kv_heads_ = 0;
    std::uint32_t head_dim_ = 0;
    std::uint32_t bands_ = 0;  // of a head's query statistics
    std::uint64_t bytes_per_token_ = 0;
    bool rotates_ = false;
};

}  // namespace generate
