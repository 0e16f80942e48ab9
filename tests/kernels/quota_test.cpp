// What is held of each segment of a prompt, and then for a measure: as on the CPU.
#include "kernels/quota.hpp"

#include "retention/rank.hpp"
#include "score_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

/// Rows of sets, of whose slots some have stored positions.
struct segmented_sets {
    static constexpr uint32_t heads = 2, block_tokens = 16, blocks_each = 20, block_units = 3;
    kvrt::block_numbering numbering{block_units};
    std::vector<uint32_t> tables, store;
    std::vector<float> scores, expected;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::quota_set> sets;
    std::vector<uint32_t> reserved;

    explicit segmented_sets(uint32_t count) {
        std::mt19937 random(11);
        for (uint32_t i = 0; i < count * blocks_each; ++i) tables.push_back(i * block_units);
        std::shuffle(tables.begin(), tables.end(), random);
        store.assign(
            (numbering.index(count * blocks_each * block_units) + 1) * heads * block_tokens,
            0xeeeeeeeeu);
        for (uint32_t i = 0; i < count; ++i) add(i, random);
    }

    kvrt::position_store view(uint32_t* base) const {
        return {base, numbering, heads * block_tokens, block_tokens};
    }

    void add(uint32_t index, std::mt19937& random) {
        const uint32_t slots = index == 0 ? 3 : 200 + random() % 120;
        const uint32_t gap = 1 + index % 4, head = index % heads;
        const uint32_t known = index % 3 == 0 ? 0 : slots - 30;
        const kvrt::guarded_slots candidates = some_candidates(slots)[index % 5];
        kernels::quota_set set{};
        set.table = uint64_t{index} * blocks_each;
        set.scores = scores.size();
        set.guarded = guarded.size();
        set.next_position = uint64_t{slots} * gap + 5;
        set.tokens = index % 6 == 5 ? ~uint64_t{0} : uint64_t{slots} * gap * 3 / 4;
        set.head = head;
        set.slots = slots;
        set.explicit_slots = known;
        set.keep = candidates.protected_slots + (slots - candidates.protected_slots) / 2;
        set.segments = 1 + random() % (index % 2 == 0 ? 7 : 60);
        set.each = 1 + random() % 30;
        kvrt::slot_positions positions;
        positions.store.open = view(store.data());
        positions.blocks = tables.data() + set.table;
        positions.kv_head = head;
        positions.slots = slots;
        positions.explicit_slots = known;
        positions.next_position = set.next_position;
        for (uint32_t slot = 0; slot < known; ++slot) {
            positions.store.of(positions.blocks, slot, head) = slot * gap + slot % gap;
        }
        std::vector<float> row =
            draw_row(index % 2 == 0 ? scores_like::ties : scores_like::normal, slots, random);
        scores.insert(scores.end(), row.begin(), row.end());
        const uint32_t places = set.keep - candidates.protected_slots;
        reserved.push_back(kvrt::reserve_segments(
            {{0, set.tokens}, set.segments, std::min(set.each, places / set.segments)}, positions,
            candidates.candidates, row.data()));
        expected.insert(expected.end(), row.begin(), row.end());
        guarded.push_back(to_kernels(candidates));
        sets.push_back(set);
    }

    template <class Cx>
    bool is_right(thread_order order) {
        const device_array<uint32_t> on_tables(tables);
        device_array<uint32_t> on_store(store);
        device_array<float> on_scores(scores);
        device_array<kernels::guarded_slots> on_guarded(guarded);
        for (kernels::quota_set& each : sets) {
            each.positions = kernels::describe(view(nullptr), on_store.data());
        }
        const device_array<kernels::quota_set> on_sets(sets);
        kernels::quota_parameters call;
        call.scores = on_scores.data();
        call.guarded = on_guarded.data();
        call.tables = on_tables.data();
        call.sets = on_sets.data();
        call.count = static_cast<uint32_t>(sets.size());
        for (const kernels::quota_set& each : sets) {
            call.most_segments = std::max(call.most_segments, each.segments);
        }
        const launch_report report =
            launch({.blocks = kernels::quota_blocks(call.count, call.most_segments),
                    .threads = kernels::select_threads,
                    .shared_bytes = kernels::quota_shared_bytes,
                    .order = order},
                   [&] { kernels::reserve_segments<Cx>(call); });
        if (std::is_same_v<Cx, context> && !report.clean()) MESSAGE(report.text());
        bool right = report.clean() && same_bits(on_scores.copy(), expected);
        for (size_t i = 0; i < sets.size(); ++i) {
            right = right && on_guarded[i].reserved == reserved[i];
        }
        return right;
    }
};

}  // namespace

TEST_CASE("quota: the best of each segment get +infinity, as on the CPU, and are counted") {
    segmented_sets sets(few_cases ? 2 : 12);
    uint32_t held = 0;
    for (const uint32_t each : sets.reserved) held += each;
    CHECK(held > (few_cases ? 0 : 100));
    for (const thread_order order : orders()) CHECK(sets.is_right<context>(order));
}

TEST_CASE("quota: its own barriers are needed") {
    segmented_sets sets(few_cases ? 2 : 12);
    // For the segment's ends, and for the candidates.
    check_barriers({"quota: its own barriers are needed", kernels::select_threads, {0, 1}, {0, 1}},
                   [&](thread_order order) { return sets.is_right<without_barrier>(order); });
}

TEST_CASE("quota: ranges of values are held as far as segments and guards leave places") {
    const uint32_t slots = 40;
    const kvrt::guarded_slots candidates = guarded_of(slots, {{4, 36}});
    std::vector<float> row(2 * slots);  // scores, then measures
    for (uint32_t i = 0; i < slots; ++i) row[slots + i] = static_cast<float>(i * 7 % slots);
    for (const uint32_t reserved : {0u, 3u, 6u, 9u}) {
        CAPTURE(reserved);
        device_array<float> scores(row);
        kernels::guarded_slots guarded = to_kernels(candidates);
        guarded.reserved = reserved;
        const device_array<kernels::guarded_slots> on_guarded({guarded});
        // 8 slots are protected, and 6 candidates have places.
        const device_array<kernels::reserve_set> sets({{slots, 0, 0, slots, 14, 4}});
        kernels::reserve_parameters call;
        call.measures = scores.data();
        call.scores = scores.data();
        call.guarded = on_guarded.data();
        call.sets = sets.data();
        call.count = 1;
        const launch_report report = launch({.threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = thread_order::shuffled},
                                            [&] { kernels::reserve_slots<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        std::vector<float> expected = row;
        const uint32_t count = std::min(4u, 6 - std::min(6u, reserved));
        kvrt::reserve_largest(row.data() + slots, candidates.candidates, count, expected.data());
        CHECK(same_bits(scores.copy(), expected));
    }
}
