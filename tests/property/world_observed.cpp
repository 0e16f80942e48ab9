#include <algorithm>
#include <cmath>

#include "world.hpp"

namespace property {

uint32_t world::places_left() const {
    uint32_t taken = 0;
    for (const std::unique_ptr<oracle_sequence>& sequence : sequences_) {
        taken += rules_of(*sequence).kind != observed_kind::nothing ? 1 : 0;
    }
    return model_.spec.max_observed_sequences - taken;
}

void world::observe(const world_item& item, uint32_t layer, const float* queries) {
    oracle_sequence& owner = *item.owner;
    if (!observes(owner, item.rows)) return;
    const observed_rules rules = rules_of(owner);
    const layer_spec& description = model_.spec.layers[layer];
    // Fingerprints make logits of thousands, whose weights f32 does not know.
    const bool numbers = filling_ == content::real_numbers && rules.kind != observed_kind::windowed;
    for (uint32_t kv_head = 0; kv_head < description.kv_heads; ++kv_head) {
        const uint32_t lane = lane_of(model_.spec, layer, kv_head);
        const oracle_lane_shape& shape = model_.lanes[lane];
        if (!shape.evictable) continue;
        if (leaves_out(model_, owner, lane, item.rows)) {
            owner.pending_gap = true;
            continue;
        }
        begin_pending(owner, lane, item.rows, numbers);
        if (!numbers) continue;
        oracle_lane& state = owner.lanes[lane];
        std::vector<double>& sums = state.pending_sums[kv_head - shape.first_head];
        std::vector<const token*> visible;
        for (const token& t : state.heads[kv_head - shape.first_head]) visible.push_back(&t);
        for (const token& t : item.tokens) visible.push_back(&t);
        std::vector<double> out(shape.value_dim), weights;
        const uint32_t first = rules.kind == observed_kind::last ? item.rows - 1 : 0;
        for (uint32_t row = first; row < item.rows; ++row) {
            const double factor =
                std::pow(double{rules.decay}, static_cast<double>(item.rows - 1 - row));
            for (uint32_t member = 0; member < description.group(); ++member) {
                const uint32_t head = kv_head * description.group() + member;
                attention_query wanted;
                wanted.lane = &shape;
                wanted.layer = &description;
                wanted.query_head = head;
                wanted.position = owner.next_position + row;
                wanted.query = queries + (std::size_t{row} * description.query_heads + head) *
                                             description.key_dim;
                attend(model_, wanted, visible, out.data(), &weights);
                for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += factor * weights[i];
            }
        }
    }
}

void world::check_observed(const oracle_sequence& target) {
    const observed_rules rules = rules_of(target);
    std::vector<float> found(model_.spec.max_tokens);
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        const oracle_lane_shape& shape = model_.lanes[lane];
        if (!shape.evictable) continue;
        const oracle_lane& state = target.lanes[lane];
        for (uint32_t head = 0; head < shape.kv_heads; ++head) {
            uint64_t count = 0;
            require_ok(kv_seq_get_scores(pool_, target.handle, shape.layer, shape.first_head + head,
                                         found.size(), found.data(), &count),
                       "kv_seq_get_scores");
            require(count == (state.observed_any ? state.slots() : 0u),
                    "sequence {} layer {}: {} scores, {} slots, observed: {}", target.serial,
                    shape.layer, count, state.slots(), state.observed_any);
            const bool given = rules.kind == observed_kind::given;
            const bool known = given || head < state.sums.size();
            for (std::size_t slot = 0; slot < count; ++slot) {
                require(given || found[slot] >= 0.0f, "sequence {} layer {} head {} slot {}: {}",
                        target.serial, shape.layer, head, slot, found[slot]);
                if (!known) continue;
                const double expected = observed_at(target, lane, head, slot);
                const double score = double{found[slot]};
                const bool same = std::isnan(expected) ? std::isnan(score) : score == expected;
                require(same || (!given && std::abs(score - expected) <= 2e-3 * expected + 1e-6),
                        "sequence {} layer {} head {} slot {} (position {}): score {} instead of "
                        "{}",
                        target.serial, shape.layer, shape.first_head + head, slot,
                        state.heads[head][slot].position, score, expected);
            }
        }
    }
}

kv_status world::set_scores(oracle_sequence& target, uint32_t layer, uint64_t first,
                            uint64_t tokens) {
    note("scores of {}: layer {}, {} + {}", target.serial, layer, first, tokens);
    const layer_spec& description = model_.spec.layers[layer];
    std::vector<float> scores;
    for (uint64_t i = 0; i < description.kv_heads * tokens; ++i) {
        scores.push_back(below(60) == 0 ? NAN : static_cast<float>(below(1000)) / 64.0f - 3.0f);
    }
    const kv_status found = kv_seq_set_scores(pool_, target.handle, layer, first, tokens,
                                              scores.empty() ? nullptr : scores.data());
    const uint32_t first_lane = lane_of(model_.spec, layer, 0);
    if (description.shared_layer >= 0 || !model_.lanes[first_lane].evictable || tokens == 0 ||
        first + tokens > target.next_position || rules_of(target).kind != observed_kind::given) {
        expect_error(found, KV_INVALID, "kv_seq_set_scores");
        return found;
    }
    require_ok(found, "kv_seq_set_scores");
    for (uint32_t kv_head = 0; kv_head < description.kv_heads; ++kv_head) {
        const uint32_t lane = lane_of(model_.spec, layer, kv_head);
        oracle_lane& state = target.lanes[lane];
        state.sums.resize(state.heads.size());
        std::vector<double>& sums = state.sums[kv_head - model_.lanes[lane].first_head];
        sums.resize(state.slots(), no_score());
        for (std::size_t slot = 0; slot < state.slots(); ++slot) {
            const uint64_t p =
                state.heads[0].empty()
                    ? 0
                    : state.heads[kv_head - model_.lanes[lane].first_head][slot].position;
            if (p < first || p >= first + tokens) continue;
            sums[slot] = double{scores[kv_head * tokens + (p - first)]};
        }
        state.observed_any = true;
        state.given_end = target.next_position;
    }
    operated();
    check_sequence(target);
    return found;
}

}  // namespace property
