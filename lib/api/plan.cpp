// Capacity planning: what a pool of this config and model would take and hold.
#include <algorithm>
#include <memory>

#include "api/create.hpp"

namespace kvrt {

namespace {

/// So that blocks of all sequences together stay below 2^64: a lane has at most 2^27 of a sequence
/// (max_position, in blocks of 16 tokens) and one raw one, a model fewer than 2^13 lanes.
constexpr uint64_t most_sequences = uint64_t{1} << 24;
static_assert(max_lanes < 1u << 13);

struct needed_blocks {
    uint64_t of_class[max_block_classes] = {};
};

/// Not where blocks are only demoted under pressure.
bool seals_by_itself(const lane_geometry& lane) {
    return lane.seals && !(lane.demotes && lane.demote_after == never_demoted);
}

/// The newest so many tokens of a lane that seals stay raw, and those of their blocks.
uint64_t demoted_behind(const lane_geometry& lane) { return lane.demotes ? lane.demote_after : 0; }

uint64_t raw_blocks_of_lane(const lane_geometry& lane, uint64_t block_tokens,
                            uint64_t step_tokens) {
    return ceil_divide(demoted_behind(lane) + block_tokens - 1 + step_tokens, block_tokens);
}

/// Blocks of one lane of a sequence that retains `tokens`, `step_tokens` of an open step among
/// them; as many as between steps, when that is one. A window keeps the tokens that its next query
/// sees, in whole blocks, and the blocks of its sinks. Where full blocks are sealed, the last ones
/// are raw, and there are blocks to seal them into.
needed_blocks blocks_of_lane(const lane_geometry& lane, uint64_t block_tokens, uint64_t tokens,
                             uint64_t step_tokens = 1) {
    needed_blocks needed;
    uint64_t most = max_position;
    if (lane.window != 0) {
        most = ceil_divide<uint64_t>(lane.window_sinks, block_tokens) +
               ceil_divide(lane.window + block_tokens - 2 + step_tokens, block_tokens);
    }
    const uint64_t all = std::min(ceil_divide(tokens, block_tokens), most);
    if (!seals_by_itself(lane)) {
        needed.of_class[lane.class_index] = all;
        return needed;
    }
    needed.of_class[lane.class_index] =
        std::min(all, raw_blocks_of_lane(lane, block_tokens, step_tokens));
    const uint64_t retained = std::min(tokens, most * block_tokens);
    const uint64_t old = retained - std::min(retained, demoted_behind(lane));
    needed.of_class[lane.sealed_class_index] += old / block_tokens;
    return needed;
}

/// Bytes of block_tokens tokens in a lane.
uint64_t bytes_of_full_block(const lane_geometry& lane) {
    return (seals_by_itself(lane) ? lane.sealed_layout : lane.layout).block_bytes;
}

needed_blocks blocks_of_sequence(const model_geometry& model, uint64_t tokens) {
    needed_blocks needed;
    for (const lane_geometry& lane : model.lanes) {
        const needed_blocks more = blocks_of_lane(lane, model.block_tokens, tokens);
        for (uint32_t c = 0; c < max_block_classes; ++c) needed.of_class[c] += more.of_class[c];
    }
    return needed;
}

needed_blocks times(const needed_blocks& one, uint64_t count) {
    needed_blocks all;
    for (uint32_t c = 0; c < max_block_classes; ++c) all.of_class[c] = one.of_class[c] * count;
    return all;
}

/// sum += count * bytes, false on overflow.
[[nodiscard]] bool add_bytes(uint64_t count, uint64_t bytes, uint64_t& sum) {
    uint64_t product = 0;
    return checked_multiply(count, bytes, product) && checked_add(sum, product, sum);
}

[[nodiscard]] bool bytes_of(const block_store& blocks, const needed_blocks& needed,
                            uint64_t& bytes) {
    bytes = 0;
    for (uint32_t c = 0; c < blocks.class_count(); ++c) {
        if (!add_bytes(needed.of_class[c], blocks.block_bytes(c), bytes)) return false;
    }
    return true;
}

/// Whole slabs: each belongs to one class.
[[nodiscard]] bool arena_of(const block_store& blocks, const needed_blocks& needed,
                            uint64_t& bytes) {
    bytes = 0;
    for (uint32_t c = 0; c < blocks.class_count(); ++c) {
        const uint64_t slabs = ceil_divide<uint64_t>(needed.of_class[c], blocks.blocks_per_slab(c));
        if (!add_bytes(slabs, slab_bytes, bytes)) return false;
    }
    return true;
}

/// The largest value in [0, limit] for which `fits` holds; fits(0) does, and no value above one
/// that does not fit may fit.
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

/// What the asked-for sequences take, however large the arena.
status plan_needs(const cache& store, kv_plan_report& report) {
    const model_geometry& model = store.model;
    const uint64_t tokens = report.tokens_per_sequence;
    const needed_blocks one = blocks_of_sequence(model, tokens);
    report.bytes_per_block = 0;
    uint64_t full_bytes_per_block = 0;
    needed_blocks constant;
    for (const lane_geometry& lane : model.lanes) {
        report.bytes_per_block += bytes_of_full_block(lane);
        needed_blocks all;
        if (lane.window != 0) {
            all = blocks_of_lane(lane, model.block_tokens, max_position);
        } else {
            full_bytes_per_block += bytes_of_full_block(lane);
            all.of_class[lane.class_index] =
                seals_by_itself(lane) ? raw_blocks_of_lane(lane, model.block_tokens, 1) : 0;
        }
        for (uint32_t c = 0; c < max_block_classes; ++c) constant.of_class[c] += all.of_class[c];
    }
    report.bytes_per_token = ceil_divide<uint64_t>(report.bytes_per_block, model.block_tokens);
    report.full_bytes_per_token = ceil_divide<uint64_t>(full_bytes_per_block, model.block_tokens);
    report.blocks_per_sequence = 0;
    for (const uint64_t blocks : one.of_class) report.blocks_per_sequence += blocks;

    const layer_geometry& layer = model.layers[report.layer];
    const lane_geometry& lane = model.lanes[layer.first_lane];
    const uint32_t lanes = layer.stores ? layer.lanes : 0;
    const needed_blocks of_layer = times(blocks_of_lane(lane, model.block_tokens, tokens), lanes);
    report.layer_bytes_per_block = lanes * bytes_of_full_block(lane);

    const block_store& blocks = store.blocks;
    if (!bytes_of(blocks, one, report.bytes_per_sequence) ||
        !bytes_of(blocks, constant, report.constant_bytes_per_sequence) ||
        !bytes_of(blocks, of_layer, report.layer_bytes_per_sequence) ||
        !arena_of(blocks, times(one, report.sequences), report.arena_bytes_needed)) {
        return fail(KV_TOO_LARGE, "report: {} sequences of {} tokens need more than 2^64 bytes",
                    report.sequences, tokens);
    }
    return KV_OK;
}

/// What an arena of this size holds.
void plan_capacity(const cache& store, uint64_t arena_bytes, kv_plan_report& report) {
    const auto fits = [&](uint64_t sequences, uint64_t tokens) {
        const needed_blocks one = blocks_of_sequence(store.model, tokens);
        return store.blocks.could_ever_allocate(times(one, sequences).of_class);
    };
    report.sequences_that_fit = largest(most_sequences, [&](uint64_t sequences) {
        return fits(sequences, report.tokens_per_sequence);
    });
    report.tokens_that_fit =
        largest(max_position, [&](uint64_t tokens) { return fits(1, tokens); });
    report.tokens_that_fit_each =
        largest(max_position, [&](uint64_t tokens) { return fits(report.sequences, tokens); });
    report.tokens_by_bytes = arena_bytes / report.bytes_per_token;
}

uint64_t metadata_of(const kv_pool& pool, uint32_t threads) {
    return pool.store.allocator.live_bytes + sizeof(kv_pool) + executor::bytes(threads);
}

status plan(const kv_pool_config* config, const kv_model* model, kv_plan_report* user) {
    kv_plan_report report;
    KVRT_TRY(adopt(user, 0, "report (kv_plan_report)", report));
    kv_pool_config resolved;
    kv_hooks hooks;
    KVRT_TRY(resolve_config(config, resolved, hooks));
    const uint64_t arena_bytes = resolved.arena_bytes;
    if (arena_bytes == 0) {
        resolved.arena_bytes = slab_bytes;  // for the sizes of blocks
    }
    KVRT_TRY(check_arena(resolved.arena_bytes));
    if (report.sequences > most_sequences || report.tokens_per_sequence > max_position) {
        return fail(KV_TOO_LARGE, "report: sequences goes up to {}, tokens_per_sequence up to {}",
                    most_sequences, max_position);
    }
    // A pool without threads: its memory is reserved, not touched, and its bytes are counted.
    auto pool = std::make_unique<kv_pool>();
    KVRT_TRY(create_stores(resolved, model, *pool));
    if (report.layer >= pool->store.model.layers.size()) {
        return fail(KV_INVALID, "report: layer {} of a model of {} layers", report.layer,
                    pool->store.model.layers.size());
    }
    if (report.sequences == 0) report.sequences = resolved.max_sequences;
    if (report.tokens_per_sequence == 0) {
        report.tokens_per_sequence = resolved.max_tokens_per_sequence;
    }
    KVRT_TRY(plan_needs(pool->store, report));
    report.sequences_that_fit = report.tokens_that_fit = report.tokens_that_fit_each = 0;
    report.tokens_by_bytes = 0;
    report.metadata_bytes = 0;
    if (arena_bytes != 0) {
        plan_capacity(pool->store, arena_bytes, report);
        report.metadata_bytes = metadata_of(*pool, resolved.threads);
    } else if (report.arena_bytes_needed <= max_arena_bytes) {
        resolved.arena_bytes = report.arena_bytes_needed;
        pool = std::make_unique<kv_pool>();
        KVRT_TRY(create_stores(resolved, model, *pool));
        report.metadata_bytes = metadata_of(*pool, resolved.threads);
    }
    deliver(report, user);
    return KV_OK;
}

/// What is asked of a sequence under a policy.
struct policy_plan {
    const kv_policy& policy;
    uint64_t tokens = 0;       ///< of the sequence; 0: not known
    uint64_t step_tokens = 0;  ///< with an open step's
    uint64_t growth = 0;       ///< between rounds
};

uint64_t kept_of(const kv_policy& policy, uint64_t budget) {
    kv_policy of_layer = policy;
    of_layer.budget = static_cast<uint32_t>(budget);
    return tokens_after_round(of_layer);
}

/// With the budgets of the layers that the policy chooses of.
needed_blocks blocks_of_plan(const cache& store, const policy_plan& plan, const uint32_t* budgets) {
    const model_geometry& model = store.model;
    // Of the same sum, each lane can have a last block that is a part.
    const bool differs = plan.policy.allocator == KV_ALLOCATE_PYRAMID ||
                         plan.policy.allocator == KV_ALLOCATE_ADAPTIVE;
    const uint64_t part = differs ? model.block_tokens : 0;
    needed_blocks all;
    for (uint32_t i = 0; i < model.layers.size(); ++i) {
        const layer_geometry& layer = model.layers[i];
        if (!layer.stores) continue;
        uint64_t tokens = plan.tokens;
        if (takes_part(store, plan.policy, i)) {
            tokens = kept_of(plan.policy, *budgets++) + plan.growth + plan.step_tokens + part;
        } else if (tokens == 0) {
            const bool window = model.lanes[layer.first_lane].window != 0;
            tokens = window ? max_position
                            : tokens_after_round(plan.policy) + plan.growth + plan.step_tokens;
        }
        const needed_blocks one =
            blocks_of_lane(model.lanes[layer.first_lane], model.block_tokens,
                           std::min<uint64_t>(tokens, max_position), plan.step_tokens);
        for (uint32_t c = 0; c < model.class_count; ++c) {
            all.of_class[c] += one.of_class[c] * layer.lanes;
        }
    }
    return all;
}

/// Budgets of the layers that the policy chooses of, the same for all or, with `steep`, those of a
/// pyramid at its steepest. Returns how many there are.
uint32_t budgets_of(const cache& store, const kv_policy& policy, bool steep, uint32_t* budgets) {
    pyramid_shape shape;
    shape.layers = 0;
    for (uint32_t i = 0; i < store.model.layers.size(); ++i) {
        if (takes_part(store, policy, i)) budgets[shape.layers++] = policy.budget;
    }
    if (!steep || shape.layers == 0) return shape.layers;
    shape.slots = store.limits.max_tokens_per_sequence;
    shape.budget = std::min(policy.budget, shape.slots);
    shape.window = policy.recent;
    if (policy.steepness != 0) shape.steepness = policy.steepness;
    allocate_pyramid(shape, budgets);
    return shape.layers;
}

/// The larger of what layers take that are all alike, and of a pyramid at its steepest: in between,
/// each layer's budget lies on the line from one to the other, so that they take no more in sum.
void plan_blocks(kv_pool& pool, const policy_plan& plan, kv_policy_footprint& footprint) {
    const cache& store = pool.store;
    uint32_t* budgets = pool.retention.scratch.budgets.data();
    const auto add = [&](bool steep) {
        const uint32_t layers = budgets_of(store, plan.policy, steep, budgets);
        uint64_t kept = 0, blocks = 0, bytes = 0;
        for (uint32_t i = 0; i < layers; ++i) kept += kept_of(plan.policy, budgets[i]);
        const needed_blocks needed = blocks_of_plan(store, plan, budgets);
        for (uint32_t c = 0; c < store.model.class_count; ++c) {
            blocks += needed.of_class[c];
            bytes += needed.of_class[c] * store.blocks.block_bytes(c);
        }
        if (layers != 0) {
            const uint64_t mean = ceil_divide<uint64_t>(kept, layers);
            footprint.tokens_after_round = std::max(footprint.tokens_after_round, mean);
        }
        footprint.blocks_steady = std::max(footprint.blocks_steady, blocks);
        footprint.bytes_steady = std::max(footprint.bytes_steady, bytes);
    };
    add(false);
    if (plan.policy.allocator == KV_ALLOCATE_PYRAMID) add(true);
}

/// What the policy leaves alone takes part in what a sequence may retain, too.
status check_other_layers(const cache& store, const policy_plan& plan) {
    const model_geometry& model = store.model;
    const uint64_t limit = store.limits.max_tokens_per_sequence;
    for (uint32_t i = 0; i < model.layers.size(); ++i) {
        const layer_geometry& layer = model.layers[i];
        if (!layer.stores || takes_part(store, plan.policy, i)) continue;
        const lane_geometry& lane = model.lanes[layer.first_lane];
        if (lane.window == 0 && plan.tokens > limit) {
            return fail(KV_TOO_LARGE,
                        "footprint: layer {} is left whole, and {} tokens are more than "
                        "max_tokens_per_sequence = {}",
                        i, plan.tokens, limit);
        }
        if (lane.window == 0) continue;
        const uint64_t held = round_up<uint64_t>(lane.window_sinks, model.block_tokens) +
                              lane.window + model.block_tokens - 2 + plan.step_tokens;
        if (std::min(held, plan.tokens == 0 ? held : plan.tokens) <= limit) continue;
        return fail(KV_TOO_LARGE,
                    "footprint: layer {} has a window of {} and holds up to {} tokens in whole "
                    "blocks with a step's, more than max_tokens_per_sequence = {}",
                    i, lane.window, held, limit);
    }
    return KV_OK;
}

status plan_policy(kv_pool& pool, const kv_policy* policy, kv_policy_footprint* user) {
    kv_policy wanted;
    kv_policy_footprint local;
    KVRT_TRY(adopt(policy, policy_flags, "policy (kv_policy)", wanted));
    KVRT_TRY(check_policy(pool.store, wanted));
    if (pool.store.on_device()) KVRT_TRY(check_policy_on_device(pool.steps, wanted));
    KVRT_TRY(adopt(user, 0, "footprint (kv_policy_footprint)", local));
    if (wanted.every == 0 && wanted.slack == 0) {
        return fail(KV_INVALID,
                    "policy: without `every` or `slack` no round is ever due, and what a sequence "
                    "takes grows with it");
    }
    if (local.tokens > max_position || local.step_tokens > max_position) {
        return fail(KV_TOO_LARGE, "footprint: tokens and step_tokens go up to {}", max_position);
    }
    policy_plan plan{wanted, local.tokens, std::max<uint64_t>(local.step_tokens, 1)};
    // A round is due once `every` tokens were accepted, or when more than `slack` came on top.
    plan.growth = wanted.every != 0 ? wanted.every - 1 : wanted.slack;
    if (wanted.slack != 0) plan.growth = std::min<uint64_t>(plan.growth, wanted.slack);
    local.tokens_after_round = tokens_after_round(wanted);
    local.blocks_steady = 0;
    local.bytes_steady = 0;
    plan_blocks(pool, plan, local);
    local.tokens_steady = local.tokens_after_round + plan.growth + plan.step_tokens;
    const uint64_t limit = pool.store.limits.max_tokens_per_sequence;
    if (local.tokens_steady > limit) {
        return fail(KV_TOO_LARGE,
                    "policy: {} tokens after a round, {} before the next one and {} of a step: no "
                    "sequence of this pool retains more than max_tokens_per_sequence = {}",
                    local.tokens_after_round, plan.growth, plan.step_tokens, limit);
    }
    KVRT_TRY(check_other_layers(pool.store, plan));
    deliver(local, user);
    return KV_OK;
}

}  // namespace

}  // namespace kvrt

extern "C" kv_status kv_pool_policy_footprint(kv_pool* pool, const kv_policy* policy,
                                              kv_policy_footprint* footprint) {
    return kvrt::call_pool(pool, [&] { return kvrt::plan_policy(*pool, policy, footprint); });
}

extern "C" kv_status kv_plan(const kv_pool_config* config, const kv_model* model,
                             kv_plan_report* report) {
    try {
        return kvrt::plan(config, model, report);
    } catch (const std::exception& error) {
        return kvrt::fail(KV_NO_MEMORY, "kv_plan: {}", error.what());
    }
}
