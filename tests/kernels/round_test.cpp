// A whole round of eviction on the device, kernel after kernel, each reading what the one before
// left: candidates, scores, z-scores, survivors, compaction. From the scores on, bytes and
// positions are compared with those of the CPU's library.
#include "format/move.hpp"
#include "kernels/compact.hpp"
#include "kernels/normalise.hpp"
#include "kernels/score.hpp"
#include "kernels/select.hpp"
#include "lane_fixture.hpp"
#include "retention/scores.hpp"
#include "retention/select.hpp"
#include "retention/triattention.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t heads = 2, group = 3, query_heads = heads * group, blocks_each = 12;
constexpr uint64_t stride = 256;

struct sequence_case {
    uint32_t slots, explicit_slots, keep;
};

struct device_round {
    std::vector<sequence_case> cases;
    uint32_t count;
    lane here;
    kvrt::block_numbering numbering;
    device_array<uint32_t> positions;
    kvrt::position_store store;
    device_array<float> scores;
    device_array<uint32_t> survivors;
    device_array<kernels::guarded_slots> guarded;

    device_round(const lane_description& what, const std::vector<sequence_case>& of)
        : cases(of),
          count(static_cast<uint32_t>(of.size())),
          here(what, count, blocks_each),
          numbering(here.layout.block_bytes / kvrt::block_unit),
          positions((numbering.index(*std::max_element(here.ids.begin(), here.ids.end())) + 1) *
                    heads * what.block_tokens),
          scores(count * query_heads * stride),
          survivors(count * heads * stride),
          guarded(count * heads) {
        // Random bytes are no keys to score.
        std::mt19937 random(3);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < here.arena.size(); i += 2) {
            const uint16_t bits = kvrt::f32_to_f16(normal(random));
            here.arena[i] = static_cast<std::byte>(bits & 0xffu);
            here.arena[i + 1] = static_cast<std::byte>(bits >> 8);
        }
        store = {positions.data(), numbering, heads * what.block_tokens, what.block_tokens};
        for (uint32_t i = 0; i < count; ++i) {
            for (uint32_t head = 0; head < heads; ++head) {
                for (uint32_t slot = 0; slot < cases[i].explicit_slots; ++slot) {
                    store.of(here.table_of(i)[slot / what.block_tokens],
                             head)[slot % what.block_tokens] = 3 * slot + (head + slot) % 3;
                }
            }
        }
    }

    uint64_t next_position(uint32_t i) const { return uint64_t{4} * cases[i].slots; }
    template <class kernel>
    void run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, thread_order order,
             const kernel& body) const {
        const launch_report report = launch(
            {.blocks = blocks, .threads = threads, .shared_bytes = shared_bytes, .order = order},
            body);
        REQUIRE_MESSAGE(report.clean(), report.text());
    }

    kernels::guard_lane guards_of(uint32_t i) const {
        kernels::guard_lane lane{};
        lane.table = uint64_t{i} * blocks_each;
        lane.next_position = next_position(i);
        lane.prompt_tokens = 20;
        lane.recent = 30;
        lane.slots = cases[i].slots;
        lane.explicit_slots = cases[i].explicit_slots;
        return lane;
    }
    void find_candidates(thread_order order) {
        std::vector<kernels::guard_lane> lanes;
        for (uint32_t i = 0; i < count; ++i) lanes.push_back(guards_of(i));
        const device_array<kernels::guard_lane> on_lanes(lanes);
        kernels::guard_parameters call;
        call.positions = kernels::describe(store, positions.data());
        call.tables = here.tables.data();
        call.lanes = on_lanes.data();
        call.guarded = guarded.data();
        call.count = count;
        call.kv_heads = heads;
        run(kernels::guard_blocks(count, heads), kernels::guard_threads,
            kernels::guard_shared_bytes, order, [&] { kernels::find_candidates<context>(call); });
    }

    void score(thread_order order) {
        kvrt::rope_description rope;
        rope.style = KV_ROPE_HALF;
        rope.dimensions = here.layout.keys.dim;
        for (uint32_t f = 0; f < rope.rotated_bands(); ++f) {
            rope.inverse_frequencies[f] = std::pow(1e4, -2.0 * f / rope.dimensions);
        }
        kvrt::triattention_shape shape;
        shape.key_dim = rope.dimensions;
        shape.group = group;
        const uint64_t phase_count = kvrt::triattention_phase_count(shape, rope);
        device_array<double> phases(count * phase_count);
        std::vector<kernels::score_lane> lanes;
        for (uint32_t i = 0; i < count; ++i) {
            kvrt::triattention_phases(shape, rope, next_position(i),
                                      phases.data() + i * phase_count);
            lanes.push_back({uint64_t{i} * blocks_each, i * query_heads * stride, 0,
                             i * phase_count, cases[i].slots, 0});
        }
        std::mt19937 random(4);
        std::normal_distribution<float> normal;
        const uint64_t bands = query_heads * rope.bands(shape.key_dim);
        device_array<float> real(bands), imaginary(bands), magnitude(bands);
        for (uint64_t b = 0; b < bands; ++b) {
            real[b] = normal(random);
            imaginary[b] = normal(random);
            magnitude[b] = std::hypot(real[b], imaginary[b]) + std::abs(normal(random));
        }
        const device_array<kernels::score_lane> on_lanes(lanes);
        kernels::triattention_parameters call;
        call.arena = here.arena.data();
        call.place = here.place;
        call.lanes = on_lanes.data();
        call.tables = here.tables.data();
        call.mean_real = real.data();
        call.mean_imaginary = imaginary.data();
        call.mean_magnitude = magnitude.data();
        call.phases = phases.data();
        call.scores = scores.data();
        call.score_stride = stride;
        call.count = count;
        call.most_slots = stride;
        call.group = group;
        call.rotated = rope.rotated_bands();
        constexpr uint32_t at_once = kernels::heads_at_once(group);
        run(kernels::score_blocks(count, heads, call.most_slots), kernels::score_threads,
            kernels::score_shared_bytes(call.bands(), at_once), order, [&] {
                kernels::score_keys<context, kernels::coding::plain, number::f16, at_once>(call);
            });
    }

    uint64_t scores_of(uint32_t i, uint32_t head) const {
        return (uint64_t{i} * query_heads + head * group) * stride;
    }

    void select(thread_order order) {
        std::vector<kernels::normalise_head> rows;
        std::vector<kernels::select_set> sets;
        for (uint32_t i = 0; i < count; ++i) {
            for (uint32_t head = 0; head < heads; ++head) {
                const uint64_t place = uint64_t{i} * heads + head;
                rows.push_back({scores_of(i, head), scores_of(i, head), place});
                sets.push_back(
                    {scores_of(i, head), place * stride, place, cases[i].slots, cases[i].keep});
            }
        }
        const device_array<kernels::normalise_head> on_rows(rows);
        kernels::normalise_parameters normalise;
        normalise.scores = scores.data();
        normalise.guarded = guarded.data();
        normalise.heads = on_rows.data();
        normalise.stride = stride;
        normalise.group = group;
        normalise.count = count * heads;
        run(normalise.count, kernels::normalise_threads, kernels::normalise_shared_bytes(group),
            order, [&] { kernels::normalise_and_reduce<context>(normalise); });

        const device_array<kernels::select_set> on_sets(sets);
        kernels::select_parameters call;
        call.scores = scores.data();
        call.survivors = survivors.data();
        call.guarded = guarded.data();
        call.sets = on_sets.data();
        call.count = count * heads;
        run(call.count, kernels::select_threads, kernels::select_shared_bytes, order,
            [&] { kernels::select_survivors<context>(call); });
    }

    void compact(thread_order order) {
        std::vector<kernels::compact_lane> lanes;
        for (uint32_t i = 0; i < count; ++i) {
            const uint64_t table = uint64_t{i} * blocks_each;
            lanes.push_back({table, table, i * heads * stride, kernels::no_sums, cases[i].keep,
                             cases[i].slots, cases[i].explicit_slots,
                             static_cast<uint32_t>(next_position(i))});
        }
        const device_array<kernels::compact_lane> on_lanes(lanes);
        kernels::compact_parameters call;
        call.arena = here.arena.data();
        call.place = here.place;
        call.positions = kernels::describe(store, positions.data());
        call.lanes = on_lanes.data();
        call.tables = here.tables.data();
        call.survivors = survivors.data();
        call.survivor_stride = stride;
        call.count = count;
        run(kernels::compact_blocks(count, heads), kernels::compact_threads,
            kernels::compact_shared_bytes, order, [&] { kernels::compact_lanes<context>(call); });
    }
};

}  // namespace

TEST_CASE("a round of eviction: guards, scores, survivors and compaction, kernel after kernel") {
    std::vector<sequence_case> cases = {{180, 100, 90}, {64, 0, 60}, {129, 129, 70}};
    if (few_cases) cases = {{70, 40, 60}};
    for (const thread_order order : emulator::all_orders) {
        device_round round({.value_format = KV_FORMAT_INT8_TOKEN}, cases);
        std::vector<std::byte> bytes = round.here.arena.copy();
        std::vector<uint32_t> positions = round.positions.copy();
        round.find_candidates(order);
        round.score(order);
        std::vector<float> scores = round.scores.copy();
        round.select(order);
        round.compact(order);

        kvrt::position_store before = round.store;
        const std::vector<uint32_t> unmoved = positions;
        before.base = const_cast<uint32_t*>(unmoved.data());
        kvrt::position_store after = round.store;
        after.base = positions.data();
        for (uint32_t i = 0; i < round.count; ++i) {
            const sequence_case& test = cases[i];
            const uint32_t* const table = round.here.table_of(i);
            for (uint32_t head = 0; head < heads; ++head) {
                kvrt::slot_positions at;
                at.store.open = before;
                at.blocks = table;
                at.kv_head = head;
                at.slots = test.slots;
                at.explicit_slots = test.explicit_slots;
                at.next_position = round.next_position(i);
                kvrt::guard_rules rules;
                rules.prompt_tokens = 20;
                rules.recent = 30;
                const kvrt::guarded_slots guarded = kvrt::apply_guards(rules, at);
                float* const row = scores.data() + round.scores_of(i, head);
                kvrt::normalise_and_reduce(row, stride, group, guarded.candidates, row);
                std::vector<uint32_t> kept(test.keep);
                kvrt::select_top(row, guarded.candidates, test.slots, test.keep, kept.data());
                CHECK(guarded.protected_slots < test.keep);
                kvrt::move_slots(round.here.layout, bytes.data(),
                                 {table, table, kept.data(), test.keep, head});
                const uint32_t tokens = round.here.layout.block_tokens;
                for (uint32_t slot = 0; slot < test.keep; ++slot) {
                    after.of(table[slot / tokens], head)[slot % tokens] =
                        static_cast<uint32_t>(at.at(kept[slot]));
                }
            }
        }
        CHECK(round.here.arena.copy() == bytes);
        CHECK(round.positions.copy() == positions);
        if (few_cases) break;
    }
}
