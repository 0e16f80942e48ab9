// Lanes of several sequences whose first blocks are sealed, in one emulated arena, with survivors,
// and what the library's own way of filling blocks makes of them.
#pragma once

#include "format/retile.hpp"
#include "kernels/compact_sealed.hpp"
#include "lane_fixture.hpp"

namespace kernel_test {

struct two_layout_case {
    uint32_t slots, sealed_blocks, opened_slots;
    uint32_t kept, front;  // of the slots, and of those at the front that stay
    uint32_t early = 0;    // demoted lanes: blocks more that are sealed than need be
    bool fresh = false;    // survivors go to other blocks, from that of the first candidate on
    bool prefix = false;   // the first ones stay, where they are
};

class two_layout_cohort {
  public:
    static constexpr uint32_t blocks_each = 12, stride = 768;

    two_layout_cohort(const lane_description& sealed_as, uint32_t raw_keys, uint32_t raw_values,
                      std::vector<two_layout_case> wanted, bool demotes)
        : cases(std::move(wanted)),
          count(static_cast<uint32_t>(cases.size())),
          heads(sealed_as.kv_heads),
          tokens(sealed_as.block_tokens),
          constants_(sealed_as, 1, 1),
          sealed(constants_.layout),
          raw(kvrt::make_tile_layout(sealed_as.order, tokens, heads, sealed_as.key_dim,
                                     sealed_as.value_dim,
                                     *kvrt::find_format(raw_keys, kvrt::operand_role::keys),
                                     *kvrt::find_format(raw_values, kvrt::operand_role::values))),
          units_(std::max(raw.block_bytes, sealed.block_bytes) / kvrt::block_unit),
          arena(size_t{3 * count * blocks_each + 3} * units_ * kvrt::block_unit),
          positions((size_t{3} * count * blocks_each + 3) * heads * tokens),
          sealed_positions(positions.size()),
          sums(size_t{count} * heads * stride),
          counts(2 * heads) {
        raw.keys.share_constants(sealed.keys);
        raw.values.share_constants(sealed.values);
        REQUIRE(kernels_describe(raw, raw_place));
        sealed_place = constants_.place;
        raw_place.keys.scales = raw_place.values.scales = sealed_place.keys.scales;
        for (uint32_t i = 0; i < 3 * count * blocks_each; ++i) ids_.push_back((i + 1) * units_);
        std::shuffle(ids_.begin(), ids_.end(), random_);
        for (std::byte& each : arena) each = std::byte{0};
        for (uint32_t& each : positions) each = static_cast<uint32_t>(random_());
        for (uint32_t& each : sealed_positions) each = static_cast<uint32_t>(random_());
        for (float& each : sums) each = static_cast<float>(random_() % 1000);
        for (uint64_t& each : counts) each = 7;
        tables.resize(size_t{2} * count * blocks_each);
        survivors.resize(size_t{count} * heads * stride);
        for (uint32_t i = 0; i < count; ++i) add(i, demotes);
    }

    /// What the library leaves: arena, positions, sums, and counts behind each other.
    struct outcome {
        std::vector<std::byte> arena;
        std::vector<uint32_t> positions, sealed_positions;
        std::vector<float> sums;
        std::vector<uint64_t> counts;
    };
    outcome expected() const {
        outcome made{arena.copy(), positions.copy(), sealed_positions.copy(), sums.copy(),
                     counts.copy()};
        for (uint32_t i = 0; i < count; ++i) {
            for (uint32_t head = 0; head < heads; ++head) move_head(i, head, made);
        }
        return made;
    }
    outcome found() const {
        return {arena.copy(), positions.copy(), sealed_positions.copy(), sums.copy(),
                counts.copy()};
    }

    kvrt::kernels::compact_sealed_parameters parameters() {
        on_tables = std::make_unique<device_array<uint32_t>>(tables);
        on_survivors = std::make_unique<device_array<uint32_t>>(survivors);
        on_lanes = std::make_unique<device_array<kvrt::kernels::compact_lane>>(lanes);
        on_more = std::make_unique<device_array<kvrt::kernels::sealed_lane>>(more);
        kvrt::kernels::compact_sealed_parameters call;
        call.all.arena = arena.data();
        call.all.place = raw_place;
        call.all.positions = kvrt::kernels::describe(store(positions.data()), positions.data());
        call.all.lanes = on_lanes->data();
        call.all.tables = on_tables->data();
        call.all.survivors = on_survivors->data();
        call.all.survivor_stride = stride;
        call.all.sums = sums.data();
        call.all.sums_stride = stride;
        call.all.count = count;
        call.sealed = sealed_place;
        call.sealed_positions =
            kvrt::kernels::describe(store(positions.data()), sealed_positions.data());
        call.lanes = on_more->data();
        return call;
    }

    const std::vector<two_layout_case> cases;
    const uint32_t count, heads, tokens;

  private:
    static bool kernels_describe(const kvrt::tile_layout& from, kvrt::kernels::block_place& to) {
        return kvrt::kernels::describe(from, to);
    }
    kvrt::position_store store(uint32_t* base) const {
        return {base, kvrt::block_numbering(units_), heads * tokens, tokens};
    }
    uint32_t next_id() {
        const uint32_t id = ids_.back();
        ids_.pop_back();
        return id;
    }
    void fill_rows(uint32_t id) {
        std::normal_distribution<float> normal;
        for (const kvrt::operand_layout* operand : {&raw.keys, &raw.values}) {
            if (!operand->plain()) continue;
            for (uint32_t head = 0; head < heads; ++head) {
                for (uint32_t slot = 0; slot < tokens; ++slot) {
                    for (uint32_t c = 0; c < operand->dim; ++c) {
                        kvrt::store_element(
                            kvrt::block_address(arena.data(), id) + operand->at(slot, head, c),
                            operand->type, 3.0f * normal(random_));
                    }
                }
            }
        }
    }
    /// Blocks of a sequence, its survivors, and where they go.
    void add(uint32_t i, bool demotes) {
        const two_layout_case& each = cases[i];
        uint32_t* const source = tables.data() + size_t{i} * blocks_each;
        uint32_t* const target = source + size_t{count} * blocks_each;
        const uint32_t blocks = kvrt::ceil_divide(each.slots, tokens);
        REQUIRE(blocks <= blocks_each);
        for (uint32_t b = 0; b < blocks; ++b) {
            source[b] = next_id();
            if (b >= each.sealed_blocks) {
                fill_rows(source[b]);
                continue;
            }
            const uint32_t written = ids_.front();
            fill_rows(written);
            const kvrt::block_run run{&raw, &sealed, &written, 0};
            for (uint32_t head = 0; head < heads; ++head) {
                kvrt::recoding recoded;
                kvrt::fill_block(run, arena.data(), nullptr, 0, tokens, head, sealed, source[b], 0,
                                 recoded);
            }
        }
        const uint32_t sealed_slots = each.sealed_blocks * tokens;
        uint32_t most_below = 0;
        for (uint32_t head = 0; head < heads; ++head) {
            std::vector<uint32_t> all;
            for (uint32_t slot = each.front; slot < each.slots; ++slot) all.push_back(slot);
            if (!each.prefix) std::shuffle(all.begin(), all.end(), random_);
            all.resize(each.kept - each.front);
            for (uint32_t slot = 0; slot < each.front; ++slot) all.push_back(slot);
            std::sort(all.begin(), all.end());
            std::copy(all.begin(), all.end(),
                      survivors.begin() + (size_t{i} * heads + head) * stride);
            const auto end = std::lower_bound(all.begin(), all.end(), sealed_slots);
            most_below = std::max(most_below, static_cast<uint32_t>(end - all.begin()));
        }
        const uint32_t kept_blocks = kvrt::ceil_divide(each.kept, tokens);
        const uint32_t sealed_after =
            !demotes ? each.kept / tokens
                     : std::min(kvrt::ceil_divide(most_below, tokens) + each.early,
                                std::min(kept_blocks, each.sealed_blocks));
        for (uint32_t b = 0; b < kept_blocks; ++b) {
            const bool other = (b < each.sealed_blocks) != (b < sealed_after);
            const bool fresh = other || (each.fresh && b >= each.front / tokens);
            target[b] = fresh ? next_id() : source[b];
        }
        const uint64_t row = uint64_t{i} * heads * stride;
        lanes.push_back({uint64_t{i} * blocks_each, uint64_t{count + i} * blocks_each, row, row,
                         each.kept, each.slots, each.slots / 2, each.slots + 1000});
        lanes[i].sums_slots = each.slots - 3;
        more.push_back({counts.data(), counts.data() + heads, sealed_slots, sealed_after * tokens,
                        sealed_slots + each.opened_slots, 0});
    }
    void move_head(uint32_t i, uint32_t head, outcome& made) const {
        const two_layout_case& each = cases[i];
        const uint32_t* const source = tables.data() + size_t{i} * blocks_each;
        const uint32_t* const target = source + size_t{count} * blocks_each;
        const uint32_t* const kept = survivors.data() + (size_t{i} * heads + head) * stride;
        const uint32_t sealed_after = more[i].sealed_after / tokens;
        const kvrt::block_run run{&raw, &sealed, source, each.sealed_blocks};
        kvrt::recoding recoded;
        for (uint32_t b = first_rebuilt(i); b * tokens < each.kept; ++b) {
            kvrt::fill_block(run, made.arena.data(), kept + b * tokens, 0,
                             std::min(tokens, each.kept - b * tokens), head,
                             b < sealed_after ? sealed : raw, target[b], more[i].coded_slots,
                             recoded);
        }
        made.counts[head] += recoded.saturated_keys;
        made.counts[heads + head] += recoded.saturated_values;
        kvrt::position_store open = store(made.positions.data());
        kvrt::position_store shut = store(made.sealed_positions.data());
        for (uint32_t slot = 0; slot < each.kept; ++slot) {
            const uint32_t old = kept[slot], from = old / tokens, to = slot / tokens;
            const uint32_t position =
                old < lanes[i].explicit_slots
                    ? (from < each.sealed_blocks ? shut : open).of(source[from], head)[old % tokens]
                    : lanes[i].next_position - lanes[i].slots + old;
            (to < sealed_after ? shut : open).of(target[to], head)[slot % tokens] = position;
            const size_t row = lanes[i].sums + size_t{head} * stride;
            made.sums[row + slot] = old < lanes[i].sums_slots ? made.sums[row + old] : 0.0f;
        }
    }
    /// As compact_tiles.cpp has it; of rows that move word by word it makes no difference.
    uint32_t first_rebuilt(uint32_t i) const {
        const uint32_t kept = cases[i].kept;
        uint32_t moving = kept;
        for (uint32_t head = 0; head < heads; ++head) {
            const uint32_t* const mine = survivors.data() + (size_t{i} * heads + head) * stride;
            uint32_t slot = 0;
            while (slot < kept && mine[slot] == slot) ++slot;
            moving = std::min(moving, slot);
        }
        const uint32_t first = std::min(moving / tokens, cases[i].sealed_blocks);
        return cases[i].fresh ? std::min(first, cases[i].front / tokens) : first;
    }

    std::mt19937 random_{11};
    lane constants_;
    std::vector<uint32_t> ids_;
    std::unique_ptr<device_array<uint32_t>> on_tables, on_survivors;
    std::unique_ptr<device_array<kvrt::kernels::compact_lane>> on_lanes;
    std::unique_ptr<device_array<kvrt::kernels::sealed_lane>> on_more;

  public:
    kvrt::tile_layout sealed, raw;
    kvrt::kernels::block_place sealed_place, raw_place;

  private:
    uint32_t units_;

  public:
    device_array<std::byte> arena;
    device_array<uint32_t> positions, sealed_positions;
    device_array<float> sums;
    device_array<uint64_t> counts;
    std::vector<uint32_t> tables, survivors;
    std::vector<kvrt::kernels::compact_lane> lanes;
    std::vector<kvrt::kernels::sealed_lane> more;
};

inline void check_outcome(const two_layout_cohort::outcome& found,
                          const two_layout_cohort::outcome& expected) {
    CHECK(found.arena == expected.arena);
    CHECK(found.positions == expected.positions);
    CHECK(found.sealed_positions == expected.sealed_positions);
    CHECK(found.sums == expected.sums);
    CHECK(found.counts == expected.counts);
}

}  // namespace kernel_test
