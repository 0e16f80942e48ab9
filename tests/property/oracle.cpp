#include <algorithm>
#include <cmath>
#include <limits>

#include "oracle_observed.hpp"

namespace property {

oracle::oracle(const pool_spec& pool, mutation deliberate)
    : spec(pool), defect(deliberate), live(std::make_unique<std::array<int64_t, 16>>()) {
    live->fill(0);
    fences.by_host = pool.host_fences();
    const std::vector<lane_spec> stored = lane_specs(pool);
    for (uint32_t lane = 0; lane < stored.size(); ++lane) {
        const layer_spec& layer = pool.layers[stored[lane].layer];
        oracle_lane_shape shape;
        shape.layer = stored[lane].layer;
        shape.first_head = stored[lane].first_head;
        shape.kv_heads = stored[lane].kv_heads;
        shape.key_dim = layer.key_dim;
        shape.value_dim = layer.value_dim;
        shape.window = layer.window;
        shape.window_sinks = layer.window_sinks;
        shape.evictable = evictable(pool, lane);
        shape.values_offset = values_per_token;
        shape.block_bytes = block_bytes(pool, lane);
        values_per_token += shape.kv_heads * (layer.key_dim + layer.value_dim);
        const auto known = std::find(class_bytes.begin(), class_bytes.end(), shape.block_bytes);
        shape.block_class = static_cast<uint32_t>(known - class_bytes.begin());
        if (known == class_bytes.end()) class_bytes.push_back(shape.block_bytes);
        lanes.push_back(shape);
    }
}

block_reference oracle::new_block(uint32_t lane) {
    return std::make_shared<oracle_block>((*live)[lanes[lane].block_class]);
}

oracle_sequence oracle::empty_sequence() const {
    oracle_sequence target;
    target.lanes.resize(lanes.size());
    for (std::size_t i = 0; i < lanes.size(); ++i) target.lanes[i].heads.resize(lanes[i].kv_heads);
    return target;
}

void oracle::drop(block_reference& block, uint32_t lane, uint64_t fence, drop_count& returned) {
    block->last_reader = std::max(block->last_reader, fence);
    if (block.use_count() == 1) {
        ++returned.blocks;
        returned.bytes += lanes[lane].block_bytes;
    }
    block.reset();
}

void oracle::shrink(oracle_sequence& owner, uint32_t lane, uint32_t keep, drop_count& returned) {
    std::vector<block_reference>& table = owner.lanes[lane].table;
    while (table.size() > keep) {
        drop(table.back(), lane, owner.last_fence, returned);
        table.pop_back();
    }
}

void oracle::release(oracle_sequence& target) {
    drop_count ignored;
    for (uint32_t lane = 0; lane < lanes.size(); ++lane) shrink(target, lane, 0, ignored);
}

oracle_sequence oracle::fork(const oracle_sequence& parent) const {
    oracle_sequence child = parent;
    child.step = -1;
    child.reserved_rows = 0;
    child.written_rows = 0;
    child.round_deferred = false;
    child.has_deferred_policy = false;
    discard_pending(child);
    for (oracle_lane& lane : child.lanes) {
        lane.table.resize(blocks_for(lane.slots()));
        if (defect == mutation::forgotten_block && !lane.table.empty()) {
            lane.table.back() = std::make_shared<oracle_block>(lane.table.back()->live);
        }
    }
    return child;
}

kv_status oracle::truncate(oracle_sequence& target, uint64_t tokens_seen) {
    if (tokens_seen > target.next_position) return KV_INVALID;
    if (tokens_seen == target.next_position) return KV_OK;
    const auto kept = [&](const std::vector<token>& head) {
        return static_cast<std::size_t>(
            std::partition_point(head.begin(), head.end(),
                                 [&](const token& t) { return t.position < tokens_seen; }) -
            head.begin());
    };
    for (std::size_t i = 0; i < lanes.size(); ++i) {
        const oracle_lane& lane = target.lanes[i];
        for (const std::vector<token>& head : lane.heads) {
            // Back into what a compaction left, only if it took nothing from before that.
            if (kept(head) != tokens_seen && kept(head) < lane.survivors) return KV_NO_SNAPSHOT;
        }
        if (lanes[i].window == 0) continue;
        // Every position that a query at tokens_seen sees must still be there.
        for (uint64_t p = 0; p < tokens_seen; ++p) {
            if (p >= lanes[i].window_sinks && p + lanes[i].window <= tokens_seen) continue;
            const bool there = std::binary_search(
                lane.heads[0].begin(), lane.heads[0].end(),
                token{static_cast<uint32_t>(p), nullptr},
                [](const token& a, const token& b) { return a.position < b.position; });
            if (!there) return KV_NO_SNAPSHOT;
        }
    }
    drop_count ignored;
    for (uint32_t i = 0; i < lanes.size(); ++i) {
        oracle_lane& lane = target.lanes[i];
        const std::size_t keep = kept(lane.heads[0]);
        for (std::vector<token>& head : lane.heads) head.resize(keep);
        lane.survivors = std::min(lane.survivors, keep);
        shrink(target, i, blocks_for(keep), ignored);
    }
    target.next_position = tokens_seen;
    truncate_observed(target);
    return KV_OK;
}

void oracle::slide(oracle_sequence& target, drop_count& returned) {
    const uint32_t tokens = spec.block_tokens;
    for (uint32_t i = 0; i < lanes.size(); ++i) {
        if (lanes[i].window == 0) continue;
        oracle_lane& lane = target.lanes[i];
        const uint32_t front_blocks = blocks_for(lanes[i].window_sinks);
        const uint32_t front = front_blocks * tokens;
        const auto invisible = [&](const token& t) {
            return t.position + uint64_t{lanes[i].window} <= target.next_position;
        };
        while (lane.slots() >= front + tokens && invisible(lane.heads[0][front + tokens - 1])) {
            for (std::vector<token>& head : lane.heads) {
                head.erase(head.begin() + front, head.begin() + front + tokens);
            }
            drop(lane.table[front_blocks], i, target.last_fence, returned);
            lane.table.erase(lane.table.begin() + front_blocks);
        }
    }
}

bool oracle::tail_is_shared(const oracle_sequence& owner, uint32_t lane) const {
    const oracle_lane& state = owner.lanes[lane];
    return state.slots() % spec.block_tokens != 0 && state.table.back().use_count() > 1;
}

std::array<uint64_t, 16> oracle::need(const oracle_sequence& owner, uint32_t rows) const {
    std::array<uint64_t, 16> blocks = {};
    for (uint32_t i = 0; i < lanes.size(); ++i) {
        const oracle_lane& lane = owner.lanes[i];
        blocks[lanes[i].block_class] += blocks_for(lane.slots() + rows) - lane.table.size() +
                                        (tail_is_shared(owner, i) ? 1 : 0);
    }
    return blocks;
}

double attend(const oracle& model, const attention_query& query,
              const std::vector<const token*>& tokens, double* out, std::vector<double>* weights) {
    const layer_spec& layer = *query.layer;
    const oracle_lane_shape& lane = *query.lane;
    const uint32_t kv_head = query.query_head / layer.group() - lane.first_head;
    const uint64_t window = layer.window + (model.defect == mutation::wide_window ? 1 : 0);
    // The default scale is a float, as everywhere in the interface.
    const double scale = double{1.0f / std::sqrt(static_cast<float>(lane.key_dim))};

    std::vector<double> logits(tokens.size(), -std::numeric_limits<double>::infinity());
    double largest = layer.sink_logits.empty() ? -std::numeric_limits<double>::infinity()
                                               : double{layer.sink_logits[query.query_head]};
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const uint64_t position = tokens[i]->position;
        if (position > query.position) continue;
        if (layer.window != 0 && position >= layer.window_sinks &&
            position + window <= query.position) {
            continue;
        }
        const float* key = lane.key(*tokens[i], kv_head);
        double logit = 0.0;
        for (uint32_t d = 0; d < lane.key_dim; ++d)
            logit += double{query.query[d]} * double{key[d]};
        logit *= scale;
        if (layer.softcap != 0.0f) {
            logit = double{layer.softcap} * std::tanh(logit / double{layer.softcap});
        }
        if (!layer.alibi_slopes.empty()) {
            logit += double{layer.alibi_slopes[query.query_head]} *
                     (static_cast<double>(position) - static_cast<double>(query.position));
        }
        logits[i] = logit;
        largest = std::max(largest, logit);
    }
    double denominator = layer.sink_logits.empty()
                             ? 0.0
                             : std::exp(double{layer.sink_logits[query.query_head]} - largest);
    std::fill_n(out, lane.value_dim, 0.0);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (std::isinf(logits[i])) continue;
        const double weight = std::exp(logits[i] - largest);
        const float* value = lane.value(*tokens[i], kv_head);
        denominator += weight;
        for (uint32_t d = 0; d < lane.value_dim; ++d) out[d] += weight * double{value[d]};
    }
    for (uint32_t d = 0; d < lane.value_dim; ++d) out[d] /= denominator;
    if (weights != nullptr) {
        weights->clear();
        for (const double logit : logits) {
            weights->push_back(std::exp(logit - largest) / denominator);
        }
    }
    return largest + std::log(denominator);
}

}  // namespace property
