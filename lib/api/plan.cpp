// Capacity planning: what a pool of this config and model would take and hold.
#include <algorithm>
#include <memory>

#include "api/create.hpp"

namespace kvrt {

namespace {

/// So that blocks of all sequences together stay below 2^64.
constexpr uint64_t most_sequences = uint64_t{1} << 24;

struct needed_blocks {
    uint64_t of_class[max_block_classes] = {};
};

/// Blocks of a sequence that retains `tokens`, between steps. A window keeps the tokens that its
/// next query sees, in whole blocks, and the blocks of its sinks.
needed_blocks blocks_of_sequence(const cache& store, uint64_t tokens) {
    needed_blocks needed;
    const uint64_t block_tokens = store.model.block_tokens;
    for (const lane_geometry& lane : store.model.lanes) {
        uint64_t blocks = ceil_divide(tokens, block_tokens);
        if (lane.window != 0) {
            blocks =
                std::min(blocks, ceil_divide<uint64_t>(lane.window_sinks, block_tokens) +
                                     ceil_divide(lane.window + block_tokens - 1, block_tokens));
        }
        needed.of_class[lane.class_index] += blocks;
    }
    return needed;
}

needed_blocks times(const needed_blocks& one, uint64_t count) {
    needed_blocks all;
    for (uint32_t c = 0; c < max_block_classes; ++c) all.of_class[c] = one.of_class[c] * count;
    return all;
}

/// The largest value in [0, limit] for which `fits` holds; fits(0) does.
template <class callable>
uint64_t largest(uint64_t limit, const callable& fits) {
    uint64_t low = 0;
    while (low < limit) {
        const uint64_t middle = low + (limit - low + 1) / 2;
        if (fits(middle)) {
            low = middle;
        } else {
            limit = middle - 1;
        }
    }
    return low;
}

status plan(const kv_pool_config* config, const kv_model* model, kv_plan_report* user) {
    kv_plan_report report;
    KVRT_TRY(adopt(user, 0, "report (kv_plan_report)", report));
    kv_pool_config resolved;
    kv_hooks hooks;
    KVRT_TRY(resolve_config(config, resolved, hooks));
    if (report.sequences > most_sequences || report.tokens_per_sequence > max_position) {
        return fail(KV_TOO_LARGE, "report: sequences goes up to {}, tokens_per_sequence up to {}",
                    most_sequences, max_position);
    }
    // A pool without threads: its memory is reserved, not touched, and its bytes are counted.
    const auto pool = std::make_unique<kv_pool>();
    KVRT_TRY(create_stores(resolved, model, *pool));
    const cache& store = pool->store;
    if (report.sequences == 0) report.sequences = resolved.max_sequences;
    if (report.tokens_per_sequence == 0) {
        report.tokens_per_sequence = resolved.max_tokens_per_sequence;
    }
    report.bytes_per_token = 0;
    for (const lane_geometry& lane : store.model.lanes) {
        report.bytes_per_token += lane.layout.block_bytes / store.model.block_tokens;
    }
    const needed_blocks one = blocks_of_sequence(store, report.tokens_per_sequence);
    const needed_blocks all = times(one, report.sequences);
    report.bytes_per_sequence = 0;
    uint64_t slabs = 0;
    for (uint32_t c = 0; c < store.blocks.class_count(); ++c) {
        report.bytes_per_sequence += one.of_class[c] * store.blocks.block_bytes(c);
        slabs += ceil_divide<uint64_t>(all.of_class[c], store.blocks.blocks_per_slab(c));
    }
    if (!checked_multiply(slabs, slab_bytes, report.arena_bytes_needed)) {
        return fail(KV_TOO_LARGE, "report: {} sequences of {} tokens need more than 2^64 bytes",
                    report.sequences, report.tokens_per_sequence);
    }
    report.sequences_that_fit = largest(most_sequences, [&](uint64_t count) {
        return store.blocks.could_ever_allocate(times(one, count).of_class);
    });
    report.tokens_that_fit = largest(max_position, [&](uint64_t tokens) {
        return store.blocks.could_ever_allocate(blocks_of_sequence(store, tokens).of_class);
    });
    report.metadata_bytes =
        store.allocator.live_bytes + sizeof(kv_pool) + executor::bytes(resolved.threads);
    deliver(report, user);
    return KV_OK;
}

}  // namespace

}  // namespace kvrt

extern "C" kv_status kv_plan(const kv_pool_config* config, const kv_model* model,
                             kv_plan_report* report) {
    try {
        return kvrt::plan(config, model, report);
    } catch (const std::exception& error) {
        return kvrt::fail(KV_NO_MEMORY, "kv_plan: {}", error.what());
    }
}
