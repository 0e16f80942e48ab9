// From scores to survivors: candidates, z-scores, joined rows, reserves and survivors are those of
// the CPU's library, bit for bit; survivors also those of a stable sort.
#include "kernels/select.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/normalise.hpp"
#include "retention/rank.hpp"
#include "retention/scores.hpp"
#include "retention/select.hpp"
#include "without_barrier.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

kvrt::guarded_slots guarded_of(uint32_t slots, std::vector<kvrt::slot_range> list) {
    kvrt::guarded_slots guarded;
    for (const kvrt::slot_range& range : list) {
        if (range.first < range.end) guarded.candidates.range[guarded.candidates.count++] = range;
    }
    guarded.protected_slots = slots - guarded.candidates.slots();
    return guarded;
}

kernels::guarded_slots to_kernels(const kvrt::guarded_slots& from) {
    kernels::guarded_slots to{};
    for (const kvrt::slot_range& range : from.candidates) {
        to.range[to.count++] = {range.first, range.end};
    }
    to.protected_slots = from.protected_slots;
    to.prompt_slots = from.prompt_slots;
    return to;
}

/// Candidates of several kinds.
std::vector<kvrt::guarded_slots> some_candidates(uint32_t slots) {
    const uint32_t third = slots / 3;
    std::vector<kvrt::slot_range> many;
    for (uint32_t i = 0; i < kvrt::max_slot_ranges; ++i) {
        const uint32_t step = slots / (kvrt::max_slot_ranges + 1);
        many.push_back({i * step + i % 3, i * step + step / 2 + 1});
    }
    return {guarded_of(slots, {{0, slots}}), guarded_of(slots, {{third, slots - third}}),
            guarded_of(slots, {{1, third}, {third + 1, slots - 1}}), guarded_of(slots, {}),
            guarded_of(slots, slots > 100 ? many : std::vector<kvrt::slot_range>{{0, 1}})};
}

/// Under the thread sanitizer one will do.
std::vector<thread_order> orders() {
    if (few_cases) return {thread_order::shuffled};
    return {std::begin(emulator::all_orders), std::end(emulator::all_orders)};
}

enum class scores_like { normal, ties, equal, odd, count };
float draw(scores_like kind, std::mt19937& random) {
    switch (kind) {
        case scores_like::normal:
            return std::normal_distribution<float>()(random);
        case scores_like::ties:
            return static_cast<float>(random() % 5) - 2.0f;
        case scores_like::equal:
            return 0.25f;
        default: {
            const float odd[] = {0.0f,      -0.0f,     NAN,        -NAN, infinity,
                                 -infinity, 0x1p-149f, -0x1p-149f, 1.0f, -3e38f};
            return odd[random() % std::size(odd)];
        }
    }
}

std::vector<float> draw_row(scores_like kind, size_t count, std::mt19937& random) {
    std::vector<float> row(count);
    for (float& each : row) each = draw(kind, random);
    return row;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Sets of rows, and what selection makes of them.
struct selection {
    std::vector<float> scores;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::select_set> sets;
    std::vector<std::vector<uint32_t>> expected;  // by the library
    std::vector<std::vector<uint32_t>> sorted;    // by a sort
    uint64_t survivors = 0;

    void add(const std::vector<float>& row, const kvrt::guarded_slots& candidates, uint32_t keep) {
        const uint32_t slots = static_cast<uint32_t>(row.size());
        sets.push_back({scores.size(), survivors, guarded.size(), slots, keep});
        scores.insert(scores.end(), row.begin(), row.end());
        guarded.push_back(to_kernels(candidates));
        survivors += keep + 1;  // an entry behind, which nobody writes
        std::vector<uint32_t> of_cpu(keep + 1, 0xffffffffu);
        REQUIRE(kvrt::select_top(row.data(), candidates.candidates, slots, keep, of_cpu.data()) ==
                keep);
        expected.push_back(of_cpu);

        std::vector<uint32_t> stay, order;
        for (uint32_t slot = 0, range = 0; slot < slots; ++slot) {
            const kvrt::slot_ranges& ranges = candidates.candidates;
            while (range < ranges.count && slot >= ranges.range[range].end) ++range;
            const bool may_go = range < ranges.count && slot >= ranges.range[range].first;
            (may_go ? order : stay).push_back(slot);
        }
        std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return !std::isnan(row[a]) && (std::isnan(row[b]) || row[a] > row[b]);
        });
        stay.insert(stay.end(), order.begin(), order.begin() + (keep - stay.size()));
        std::sort(stay.begin(), stay.end());
        stay.push_back(0xffffffffu);
        sorted.push_back(stay);
    }

    void add_all_kinds(uint32_t slots, std::mt19937& random) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                const uint32_t held = each.protected_slots, free = slots - held;
                for (const uint32_t more : {0u, 1u, free / 3, free - 1, free}) {
                    if (more > free) continue;
                    add(draw_row(static_cast<scores_like>(kind), slots, random), each, held + more);
                }
            }
        }
    }

    template <class Cx>
    launch_report run(thread_order order, std::vector<uint32_t>& out) const {
        const device_array<float> on_scores(scores);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        const device_array<kernels::select_set> on_sets(sets);
        device_array<uint32_t> on_survivors(survivors);
        kernels::select_parameters call;
        call.scores = on_scores.data();
        call.survivors = on_survivors.data();
        call.guarded = on_guarded.data();
        call.sets = on_sets.data();
        call.count = static_cast<uint32_t>(sets.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = order},
                                            [&] { kernels::select_survivors<Cx>(call); });
        out = on_survivors.copy();
        return report;
    }

    /// Of set i.
    std::vector<uint32_t> survivors_of(const std::vector<uint32_t>& all, size_t i) const {
        const auto first = all.begin() + static_cast<std::ptrdiff_t>(sets[i].survivors);
        return {first, first + sets[i].keep + 1};
    }
    bool is_right(const std::vector<uint32_t>& all) const {
        for (size_t i = 0; i < sets.size(); ++i) {
            if (survivors_of(all, i) != expected[i]) return false;
        }
        return true;
    }
};

/// The emulator's context, whose warps do not wait for each other's stores.
struct without_warp_barrier : context {
    static void warp_barrier(uint32_t = 0xffffffffu) {}
};

}  // namespace

TEST_CASE("selecting kernel: the survivors are the CPU's, and those of a sort") {
    std::mt19937 random(1);
    const std::pair<uint32_t, uint32_t> lengths[] = {{1, 2500}, {2, 300}, {40, 1024}};
    for (const thread_order order : orders()) {
        selection all;
        if (few_cases) {
            all.add(draw_row(scores_like::ties, 1100, random), some_candidates(1100)[2], 700);
        } else {
            const auto& [few, many] = lengths[static_cast<uint32_t>(order)];
            all.add_all_kinds(few, random);
            all.add_all_kinds(many, random);
        }
        std::vector<uint32_t> survivors;
        const launch_report report = all.run<context>(order, survivors);
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (size_t i = 0; i < all.sets.size(); ++i) {
            CAPTURE(i);
            REQUIRE(all.survivors_of(survivors, i) == all.expected[i]);
            REQUIRE(all.survivors_of(survivors, i) == all.sorted[i]);
        }
    }
}

namespace {

std::vector<float> normal_row() {
    std::mt19937 random(2);
    return draw_row(scores_like::normal, few_cases ? 300 : 2500, random);
}

void check_barriers_of(const barrier_test& test, const selection& one) {
    check_barriers(test, [&](thread_order order) {
        std::vector<uint32_t> survivors;
        return one.run<without_barrier>(order, survivors).clean() && one.is_right(survivors);
    });
}

}  // namespace

TEST_CASE("selecting kernel: each of its barriers is needed") {
    const std::vector<float> row = normal_row();
    const uint32_t slots = static_cast<uint32_t>(row.size());
    selection one;
    one.add(row, some_candidates(slots)[2], slots / 2);
    // One for the candidates, four for each of four digits, one for each tile.
    check_barriers_of({"selecting kernel: each of its barriers is needed",
                       kernels::select_threads,
                       {1, 2, 3, 4, 5, 17},
                       {2, 3, 17, 18}},
                      one);
}

TEST_CASE("selecting kernel: its first barrier is needed") {
    const std::vector<float> row = normal_row();
    const kvrt::guarded_slots candidates = some_candidates(static_cast<uint32_t>(row.size()))[2];
    selection one;
    one.add(row, candidates, candidates.protected_slots);
    check_barriers_of(
        {"selecting kernel: its first barrier is needed", kernels::select_threads, {0, 1}, {0, 1}},
        one);
}

TEST_CASE("selecting kernel: more slots held than kept writes no more than that") {
    selection one;
    one.add(std::vector<float>(50, 1.0f), guarded_of(50, {{20, 30}}), 40);
    one.sets[0].keep = 35;
    std::vector<uint32_t> survivors;
    const launch_report report = one.run<context>(thread_order::shuffled, survivors);
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(survivors[34] == 44);
    CHECK(survivors[35] == 0xffffffffu);
}

TEST_CASE("reserving kernel: the largest measures get +infinity, as on the CPU") {
    std::mt19937 random(3);
    std::vector<float> measures, scores, expected;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::reserve_set> sets;
    for (const uint32_t slots : few_cases ? std::vector{70u} : std::vector{5u, 1500u}) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                const uint32_t keep = random() % (slots + 3);
                sets.push_back({measures.size(), scores.size(), guarded.size(), slots, keep});
                guarded.push_back(to_kernels(each));
                const std::vector<float> measure =
                    draw_row(static_cast<scores_like>(kind), slots, random);
                std::vector<float> row(slots, 2.0f);
                measures.insert(measures.end(), measure.begin(), measure.end());
                scores.insert(scores.end(), row.begin(), row.end());
                kvrt::reserve_largest(measure.data(), each.candidates, keep, row.data());
                expected.insert(expected.end(), row.begin(), row.end());
                if (few_cases) break;
            }
            if (few_cases) break;
        }
    }
    const device_array<kernels::guarded_slots> on_guarded(guarded);
    const device_array<kernels::reserve_set> on_sets(sets);
    for (const thread_order order : orders()) {
        const device_array<float> on_measures(measures);
        device_array<float> on_scores(scores);
        kernels::reserve_parameters call;
        call.measures = on_measures.data();
        call.scores = on_scores.data();
        call.guarded = on_guarded.data();
        call.sets = on_sets.data();
        call.count = static_cast<uint32_t>(sets.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = order},
                                            [&] { kernels::reserve_slots<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(same_bits(on_scores.copy(), expected));
    }
}

TEST_CASE("reserving kernel: scores may be their own measure") {
    std::mt19937 random(4);
    std::vector<float> row = draw_row(scores_like::ties, few_cases ? 300 : 3000, random);
    const uint32_t slots = static_cast<uint32_t>(row.size());
    const kvrt::guarded_slots candidates = some_candidates(slots)[2];
    device_array<float> scores(row);
    const device_array<kernels::guarded_slots> guarded({to_kernels(candidates)});
    const device_array<kernels::reserve_set> sets({{0, 0, 0, slots, slots / 2}});
    kernels::reserve_parameters call;
    call.measures = scores.data();
    call.scores = scores.data();
    call.guarded = guarded.data();
    call.sets = sets.data();
    call.count = 1;
    const launch_report report = launch({.threads = kernels::select_threads,
                                         .shared_bytes = kernels::select_shared_bytes,
                                         .order = thread_order::descending},
                                        [&] { kernels::reserve_slots<context>(call); });
    REQUIRE_MESSAGE(report.clean(), report.text());
    kvrt::reserve_largest(row.data(), candidates.candidates, slots / 2, row.data());
    CHECK(same_bits(scores.copy(), row));
}

namespace {

/// Rows of several KV heads, normalised.
struct normalisation {
    uint32_t group;
    uint64_t stride;
    std::vector<float> scores, expected;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::normalise_head> heads;

    normalisation(uint32_t rows, uint32_t slots, std::mt19937& random)
        : group(rows), stride(slots + 1) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                add(draw_row(static_cast<scores_like>(kind), group * stride, random), each);
                if (few_cases) break;
            }
        }
    }
    void add(std::vector<float> rows, const kvrt::guarded_slots& candidates) {
        const bool in_place = heads.size() % 2 == 0;
        const uint64_t first = scores.size();
        // Elsewhere: a row of its own behind those of the head.
        heads.push_back({first, in_place ? first : first + group * stride, guarded.size()});
        guarded.push_back(to_kernels(candidates));
        rows.resize((group + 1) * stride, -5.0f);
        scores.insert(scores.end(), rows.begin(), rows.end());
        kvrt::normalise_and_reduce(rows.data(), stride, group, candidates.candidates,
                                   rows.data() + (in_place ? 0 : group * stride));
        expected.insert(expected.end(), rows.begin(), rows.end());
    }
    template <class Cx>
    launch_report run(thread_order order, std::vector<float>& out) const {
        device_array<float> on_scores(scores);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        const device_array<kernels::normalise_head> on_heads(heads);
        kernels::normalise_parameters call;
        call.scores = on_scores.data();
        call.guarded = on_guarded.data();
        call.heads = on_heads.data();
        call.stride = stride;
        call.group = group;
        call.count = static_cast<uint32_t>(heads.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::normalise_threads,
                                             .shared_bytes = kernels::normalise_shared_bytes(group),
                                             .order = order},
                                            [&] { kernels::normalise_and_reduce<Cx>(call); });
        out = on_scores.copy();
        return report;
    }
};

}  // namespace

TEST_CASE("normalising kernel: the bits are the CPU's, and z-scores by definition") {
    std::mt19937 random(5);
    const std::pair<uint32_t, uint32_t> shapes[] = {{4, 300}, {1, 40}, {12, 150}};
    for (const auto& [group, slots] : shapes) {
        CAPTURE(group);
        const normalisation all(group, few_cases ? 40 : slots, random);
        for (const thread_order order : orders()) {
            std::vector<float> out;
            const launch_report report = all.run<context>(order, out);
            REQUIRE_MESSAGE(report.clean(), report.text());
            CHECK(same_bits(out, all.expected));
        }
        if (few_cases) break;
    }
    // By hand: mean 2, population deviation sqrt(2); the second row is its mirror image.
    normalisation hand(2, 1, random);
    hand = {2, 4, random};
    hand.heads.clear();
    hand.guarded.clear();
    hand.scores.clear();
    hand.expected.clear();
    hand.add({9, 0, 2, 4, 2, 9, 4, 2, 0, 2}, guarded_of(5, {{1, 5}}));
    std::vector<float> out;
    const launch_report report = hand.run<context>(thread_order::ascending, out);
    REQUIRE_MESSAGE(report.clean(), report.text());
    const float greatest[] = {9, 1.41421356f, 0, 1.41421356f, 0};
    for (int i = 0; i < 5; ++i) CHECK(out[i] == doctest::Approx(greatest[i]));
}

TEST_CASE("normalising kernel: its barrier is needed") {
    std::mt19937 random(6);
    normalisation one(12, few_cases ? 30 : 150, random);
    if (few_cases) one.heads.resize(1);
    check_barriers(
        {"normalising kernel: its barrier is needed", kernels::normalise_threads, {0}, {0}},
        [&](thread_order order) {
            std::vector<float> out;
            return one.run<without_barrier>(order, out).clean() && same_bits(out, one.expected);
        });
}

TEST_CASE("joining kernel: sums and maxima of rows as on the CPU") {
    std::mt19937 random(7);
    const uint32_t stride = few_cases ? 130 : 1300, rows = 6;
    std::vector<float> scores;
    for (uint32_t row = 0; row < rows; ++row) {
        const auto kind = row % 3 == 2 ? scores_like::odd : scores_like::normal;
        const std::vector<float> drawn = draw_row(kind, stride, random);
        scores.insert(scores.end(), drawn.begin(), drawn.end());
    }
    scores.resize((rows + 1) * stride, -5.0f);  // and a row for totals
    const auto row_at = [&](std::vector<float>& of, uint32_t row) {
        return of.data() + row * stride;
    };
    const std::vector<kvrt::guarded_slots> candidates = some_candidates(stride);
    for (const bool greatest : {false, true}) {
        std::vector<float> expected = scores;
        // The first set goes to a row of its own, the second to one of its members.
        const std::vector<std::vector<uint32_t>> members = {{0, 2, 4}, {5, 1, 3}};
        const uint32_t outs[] = {rows, 1};
        std::vector<kernels::score_join> joins;
        std::vector<uint64_t> places;
        std::vector<kernels::guarded_slots> guarded;
        for (uint32_t set = 0; set < 2; ++set) {
            const kvrt::slot_ranges& here = candidates[set + 1].candidates;
            std::vector<float> total(stride);
            kvrt::fill_scores(here, greatest ? -infinity : 0.0f, total.data());
            joins.push_back({uint64_t{outs[set]} * stride, places.size(), set, 3, 0});
            guarded.push_back(to_kernels(candidates[set + 1]));
            for (const uint32_t member : members[set]) {
                places.push_back(uint64_t{member} * stride);
                const float* const part = row_at(scores, member);
                greatest ? kvrt::raise_scores(here, part, total.data())
                         : kvrt::add_scores(here, part, total.data());
            }
            for (const kvrt::slot_range& range : here) {
                std::copy(total.begin() + range.first, total.begin() + range.end,
                          row_at(expected, outs[set]) + range.first);
            }
        }
        for (const thread_order order : orders()) {
            device_array<float> on_scores(scores);
            const device_array<kernels::guarded_slots> on_guarded(guarded);
            const device_array<kernels::score_join> on_joins(joins);
            const device_array<uint64_t> on_members(places);
            kernels::join_parameters call;
            call.scores = on_scores.data();
            call.guarded = on_guarded.data();
            call.joins = on_joins.data();
            call.members = on_members.data();
            call.count = 2;
            call.most_slots = stride;
            call.greatest = greatest;
            const launch_report report = launch({.blocks = kernels::join_blocks(2, stride),
                                                 .threads = kernels::normalise_threads,
                                                 .order = order},
                                                [&] { kernels::join_rows<context>(call); });
            REQUIRE_MESSAGE(report.clean(), report.text());
            const std::vector<float> got = on_scores.copy();
            for (size_t i = 0; i < got.size(); ++i) {
                REQUIRE((got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))));
            }
        }
    }
}

namespace {

/// Lanes of two KV heads, part of whose positions are stored.
struct guarded_cohort {
    static constexpr uint32_t heads = 2, block_tokens = 16, blocks_each = 24, block_units = 3;
    uint32_t count;
    kvrt::block_numbering numbering{block_units};
    std::vector<uint32_t> tables;
    std::vector<uint32_t> store;
    std::vector<kernels::guard_lane> lanes;
    std::vector<kernels::position_range> pinned;
    std::vector<kvrt::guarded_slots> expected;
    std::vector<uint32_t> before_recent;

    guarded_cohort(uint32_t lane_count, uint32_t seed) : count(lane_count) {
        std::mt19937 random(seed);
        for (uint32_t i = 0; i < count * blocks_each; ++i) tables.push_back(i * block_units);
        std::shuffle(tables.begin(), tables.end(), random);
        const uint32_t most_id = *std::max_element(tables.begin(), tables.end());
        store.assign((numbering.index(most_id) + 1) * heads * block_tokens, 0xeeeeeeeeu);
        const kvrt::position_store view{store.data(), numbering, heads * block_tokens,
                                        block_tokens};
        for (uint32_t i = 0; i < count; ++i) add(i, view, random);
    }

    void add(uint32_t index, const kvrt::position_store& view, std::mt19937& random) {
        const uint32_t slots = index == 0 ? 1 : 1 + random() % (blocks_each * block_tokens);
        const uint32_t known = index % 3 == 0 ? 0 : random() % (slots + 1);
        const uint64_t gap = 1 + random() % 5;
        const uint64_t next = index == 1 ? uint64_t{5} << 32 : slots * gap + 40;
        const uint32_t* const table = tables.data() + index * blocks_each;
        kernels::guard_lane lane{};
        lane.table = uint64_t{index} * blocks_each;
        lane.pinned = pinned.size();
        lane.next_position = next;
        lane.prompt_tokens = index % 4 == 0 ? 0 : random() % 60;
        lane.sinks = random() % 5;
        lane.recent = index % 5 == 0 ? ~uint64_t{0} : random() % 90;
        lane.slots = slots;
        lane.explicit_slots = known;
        lane.pinned_count = index % 2 == 0 ? random() % (kernels::most_pinned + 1) : index % 4;
        for (uint32_t p = 0; p < lane.pinned_count; ++p) {
            const uint64_t length = p == 3 ? ~uint64_t{0} : random() % 30;
            pinned.push_back({random() % (slots * gap + 50), p == 3 && index != 2 ? 7 : length});
        }
        std::vector<kvrt::position_range> ranges;
        for (uint32_t p = 0; p < lane.pinned_count; ++p) {
            ranges.push_back({pinned[lane.pinned + p].first, pinned[lane.pinned + p].count});
        }
        lanes.push_back(lane);
        for (uint32_t head = 0; head < heads; ++head) {
            for (uint32_t slot = 0; slot < known; ++slot) {
                view.of(table[slot / block_tokens], head)[slot % block_tokens] =
                    static_cast<uint32_t>(slot * gap + (head + slot) % gap);
            }
            kvrt::slot_positions positions;
            positions.store.open = view;
            positions.blocks = table;
            positions.kv_head = head;
            positions.slots = slots;
            positions.explicit_slots = known;
            positions.next_position = next;
            kvrt::guard_rules rules;
            rules.prompt_tokens = lane.prompt_tokens;
            rules.sinks = lane.sinks;
            rules.recent = lane.recent;
            rules.pinned = ranges.data();
            rules.pinned_count = lane.pinned_count;
            expected.push_back(kvrt::apply_guards(rules, positions));
            before_recent.push_back(positions.find(next - std::min(next, rules.recent)));
        }
    }

    template <class Cx>
    bool is_right(thread_order order) const {
        const device_array<uint32_t> on_tables(tables);
        device_array<uint32_t> on_store(store);
        const device_array<kernels::guard_lane> on_lanes(lanes);
        const device_array<kernels::position_range> on_pinned(pinned);
        device_array<kernels::guarded_slots> out(count * heads);
        kernels::guard_parameters call;
        call.positions = kernels::describe({nullptr, numbering, heads * block_tokens, block_tokens},
                                           on_store.data());
        call.tables = on_tables.data();
        call.lanes = on_lanes.data();
        call.pinned = on_pinned.data();
        call.guarded = out.data();
        call.count = count;
        call.kv_heads = heads;
        const launch_report report = launch({.blocks = kernels::guard_blocks(count, heads),
                                             .threads = kernels::guard_threads,
                                             .shared_bytes = kernels::guard_shared_bytes,
                                             .order = order},
                                            [&] { kernels::find_candidates<Cx>(call); });
        if (!report.clean()) MESSAGE(report.text());
        bool same = report.clean();
        for (uint32_t i = 0; i < count * heads && same; ++i) {
            const kvrt::slot_ranges& ranges = expected[i].candidates;
            same = out[i].count == ranges.count &&
                   out[i].protected_slots == expected[i].protected_slots &&
                   out[i].prompt_slots == expected[i].prompt_slots &&
                   out[i].before_recent == before_recent[i] &&
                   std::memcmp(out[i].range, ranges.range.data(),
                               ranges.count * sizeof(kvrt::slot_range)) == 0;
        }
        return same;
    }
};

}  // namespace

TEST_CASE("guards: candidates are those of the CPU") {
    for (const uint32_t seed : {1u, 2u, 3u}) {
        if (few_cases && seed != 2) continue;
        const guarded_cohort cohort(few_cases ? 3 : 30, seed);
        for (const thread_order order : orders()) CHECK(cohort.is_right<context>(order));
    }
}

TEST_CASE("guards: their warps' barrier is needed") {
    if (few_cases) {
        MESSAGE("left to the other trees: what is missing would end this one");
        return;
    }
    const guarded_cohort cohort(30, 4);
    bool right = true;
    for (const thread_order order : orders()) {
        right = right && cohort.is_right<without_warp_barrier>(order);
    }
    CHECK_FALSE(right);
}
