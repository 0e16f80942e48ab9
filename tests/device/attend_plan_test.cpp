// How a step's rows are cut for attention kernels: every row meets every slot once, partial results
// have places of their own, and no more is listed than the bounds say.
#include "driver/attend_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "fake_driver.hpp"
#include "kernels/attend_rows.hpp"

using namespace kvrt::cuda;
namespace kernels = kvrt::kernels;

namespace {

struct item_shape {
    uint32_t rows, slots, sealed;
    uint32_t kept_rows = 0;
};

struct made_plan {
    kvrt_attend_bounds bounds = {};
    kvrt_attend_plan plan = {};
    std::vector<kvrt_attend_sequence> items, sequences;
    std::vector<kvrt_attend_piece> pieces[2];
    std::vector<kvrt_rows_piece> row_pieces[2];
    std::vector<kvrt_attend_wave> waves;

    made_plan(const kvrt_attend_view& view, const std::vector<item_shape>& shapes,
              uint64_t most_partials = 0, uint32_t most_kept = 0) {
        bounds.view = view;
        bounds.most_kept = plan.most_kept = most_kept;
        uint32_t row = 0;
        for (const item_shape& shape : shapes) {
            kvrt_attend_sequence item = {};
            item.table = static_cast<uint32_t>(items.size());
            item.first_row = row;
            item.rows = shape.rows;
            item.slots = shape.slots;
            item.next_position = shape.slots + 7;
            item.window_first = static_cast<int32_t>(shape.slots + 1 - shape.rows) -
                                static_cast<int32_t>(view.window);
            item.sealed_slots = shape.sealed;
            item.kept_rows = shape.kept_rows;
            items.push_back(item);
            row += shape.rows;
            bounds.item_rows = std::max(bounds.item_rows, shape.rows);
            bounds.slots = std::max(bounds.slots, shape.slots);
        }
        bounds.items = static_cast<uint32_t>(shapes.size());
        bounds.rows = row;
        bound_attention(bounds);
        sequences.resize(bounds.sequences + 1);
        waves.resize(bounds.sequences + 1);
        for (uint32_t kind = 0; kind < 2; ++kind) {
            pieces[kind].resize(bounds.pieces + 1000);
            row_pieces[kind].resize(bounds.row_pieces + 1000);
            plan.pieces[kind] = pieces[kind].data();
            plan.row_pieces[kind] = row_pieces[kind].data();
        }
        plan.view = view;
        plan.items = items.data();
        plan.item_count = bounds.items;
        plan.most_partials = most_partials != 0 ? most_partials : uint64_t{1} << 32;
        if (most_partials == 1) plan.most_partials = std::max<uint64_t>(bounds.partials, 1);
        plan.sequences = sequences.data();
        plan.waves = waves.data();
        plan_attention(plan);
    }

    /// Which wave a list's entry belongs to; none, or more than one, is an error.
    uint32_t wave_of(uint32_t index, const uint32_t (kvrt_attend_wave::*first)[2],
                     const uint32_t (kvrt_attend_wave::*count)[2], uint32_t kind) const {
        uint32_t found = ~0u, times = 0;
        for (uint32_t w = 0; w < plan.wave_count; ++w) {
            const uint32_t begin = (waves[w].*first)[kind];
            if (index < begin || index >= begin + (waves[w].*count)[kind]) continue;
            found = w;
            ++times;
        }
        CHECK(times == 1);
        return found;
    }
};

/// A piece as both lists have them.
struct listed_piece {
    uint32_t wave, kind, sequence, first_vector, vectors, first_slot, end_slot, partial;
};

void check_plan(const made_plan& made) {
    const kvrt_attend_plan& plan = made.plan;
    const uint32_t group = plan.view.group;
    CHECK(plan.sequence_count <= made.bounds.sequences);
    std::vector<listed_piece> all;
    for (uint32_t kind = 0; kind < 2; ++kind) {
        CHECK(plan.piece_count[kind] <= made.bounds.pieces);
        CHECK(plan.row_piece_count[kind] <= made.bounds.row_pieces);
        for (uint32_t i = 0; i < plan.piece_count[kind]; ++i) {
            const kvrt_attend_piece& each = made.pieces[kind][i];
            const uint32_t wave =
                made.wave_of(i, &kvrt_attend_wave::first_piece, &kvrt_attend_wave::pieces, kind);
            const uint32_t vectors = made.sequences[each.sequence].rows * group;
            CHECK(vectors <= kernels::query_rows);
            // The last one may reach beyond the sequence.
            const uint32_t end = std::min(each.end_slot, made.sequences[each.sequence].slots);
            all.push_back(
                {wave, kind, each.sequence, 0, vectors, each.first_slot, end, each.partial});
        }
        for (uint32_t i = 0; i < plan.row_piece_count[kind]; ++i) {
            const kvrt_rows_piece& each = made.row_pieces[kind][i];
            const uint32_t wave = made.wave_of(i, &kvrt_attend_wave::first_row_piece,
                                               &kvrt_attend_wave::row_pieces, kind);
            CHECK(each.vectors <= kernels::tile_vectors);
            all.push_back({wave, kind, each.sequence, each.first_vector, each.vectors,
                           each.first_slot, each.end_slot, each.partial});
        }
    }
    // What each row of the step meets, and what its parts are joined from.
    std::map<uint32_t, std::map<uint32_t, uint32_t>> met;  // row and head of a group: slot, end
    std::map<std::pair<uint32_t, uint64_t>, std::pair<uint32_t, uint32_t>> partials;  // whose
    std::map<uint32_t, std::set<uint64_t>> left;  // of a row and head of a group
    for (const listed_piece& each : all) {
        const kvrt_attend_sequence& sequence = made.sequences[each.sequence];
        const kvrt_attend_wave& wave = made.waves[each.wave];
        CHECK(each.sequence >= wave.first_sequence);
        CHECK(each.sequence < wave.first_sequence + wave.sequences);
        CHECK(each.first_slot % 16 == 0);
        CHECK(each.first_slot < each.end_slot);
        CHECK((each.kind == 1) == (each.first_slot < sequence.sealed_slots));
        if (each.kind == 1) CHECK(each.end_slot <= sequence.sealed_slots);
        for (uint32_t v = each.first_vector; v < each.first_vector + each.vectors; ++v) {
            const uint32_t row = v / group, place = (sequence.first_row + row) * group + v % group;
            CHECK(met[place].emplace(each.first_slot, each.end_slot).second);
            if (each.partial == kernels::written_at_once) {
                CHECK(sequence.pieces == 0);
                continue;
            }
            const uint64_t partial = uint64_t{each.partial} + row;
            CHECK(partial < plan.most_partials);
            CHECK(sequence.rows <= wave.joined_rows);
            const auto owner = std::make_pair(each.sequence, row);
            CHECK(partials.emplace(std::make_pair(each.wave, partial), owner).first->second ==
                  owner);
            left[place].insert(partial);
        }
    }
    for (uint32_t w = 0; w < plan.wave_count; ++w) {  // entries for weights are side by side
        uint32_t kept = 0;
        for (uint32_t s = 0; s < made.waves[w].sequences; ++s) {
            const kvrt_attend_sequence& each = made.sequences[made.waves[w].first_sequence + s];
            if (each.kept_rows != 0) CHECK(each.kept == kept);
            kept += each.kept_rows * ((each.slots + 15) / 16 + 1);
        }
        CHECK(kept == made.waves[w].kept);
        CHECK(kept <= plan.most_kept);
    }
    uint32_t row = 0;
    std::map<uint32_t, uint32_t> item_rows;
    for (uint32_t s = 0; s < plan.sequence_count; ++s) {
        const kvrt_attend_sequence& sequence = made.sequences[s];
        const kvrt_attend_sequence& item = made.items[sequence.table];
        CHECK(sequence.first_row == row);
        const uint32_t in_item = item_rows[sequence.table];
        const uint32_t behind = item.rows - in_item - sequence.rows;
        CHECK(sequence.slots == item.slots - behind);
        const uint32_t not_kept = item.rows - item.kept_rows;
        CHECK(sequence.kept_rows ==
              std::max(in_item + sequence.rows, not_kept) - std::max(in_item, not_kept));
        CHECK(sequence.next_position == item.next_position - behind);
        CHECK(sequence.window_first == item.window_first + static_cast<int32_t>(in_item));
        item_rows[sequence.table] += sequence.rows;
        row += sequence.rows;
        CHECK(uint64_t{sequence.pieces} * sequence.rows <= made.bounds.partials);
        if (sequence.pieces != 0) CHECK(sequence.rows <= made.bounds.joined_rows);
        for (uint32_t v = 0; v < sequence.rows * group; ++v) {
            const uint32_t place = sequence.first_row * group + v;
            uint32_t end = 0;
            for (const auto& [first, piece_end] : met[place]) {
                CHECK(first == end);
                end = piece_end;
            }
            CHECK(end == sequence.slots);
            CHECK(left[place].size() == sequence.pieces);
            // As a join looks for them.
            for (uint32_t p = 0; p < sequence.pieces; ++p) {
                CHECK(left[place].count(sequence.first_partial + uint64_t{p} * sequence.rows +
                                        v / group) == 1);
            }
        }
    }
    CHECK(row == made.bounds.rows);
}

}  // namespace

TEST_CASE("plans of attention: every row meets every slot once, within bounds") {
    std::mt19937 random(11);
    const auto below = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
    for (uint32_t round = 0; round < 60; ++round) {
        CAPTURE(round);
        kvrt_attend_view view = {};
        const uint32_t groups[] = {1, 2, 4, 7, 16, 24};
        view.group = groups[below(6)];
        view.seals = round % 3 == 0 ? 1 : 0;
        if (round % 4 == 1) {
            view.window = 1 + below(900);
            view.window_sinks = below(100);
        }
        std::vector<item_shape> shapes;
        for (uint32_t i = 1 + below(5); i > 0; --i) {
            const uint32_t most_rows[] = {1, 3, 20, 150, 700};
            const uint32_t rows = 1 + below(most_rows[below(5)]);
            const uint32_t slots = rows + below(below(2) != 0 ? 3000 : 40);
            const uint32_t sealed = view.seals == 0 ? 0 : below((slots - rows) / 16 + 1) * 16;
            const bool keeps = view.window == 0 && round % 5 < 2;
            shapes.push_back({rows, slots, sealed, keeps ? below(rows + 1) : 0});
        }
        // Of weights there is room for a few rows of the longest, or for all.
        uint32_t least_kept = 0;
        for (const item_shape& each : shapes) {
            least_kept = std::max(least_kept, (each.slots + 15) / 16 + 1);
        }
        const made_plan whole(view, shapes, 0, 4000 * least_kept);
        check_plan(whole);
        CHECK(whole.plan.wave_count == 1);
        const made_plan tight(view, shapes, 1, (1 + below(30)) * least_kept);
        check_plan(tight);
        // What is cut where depends on a sequence alone.
        const made_plan alone(view, {shapes.back()}, 0, 4000 * least_kept);
        const uint32_t count = alone.plan.sequence_count;
        for (uint32_t s = 0; s < count; ++s) {
            const uint32_t among = whole.plan.sequence_count - count + s;
            CHECK(alone.sequences[s].rows == whole.sequences[among].rows);
            CHECK(alone.sequences[s].pieces == whole.sequences[among].pieces);
        }
    }
}

TEST_CASE("plans of attention: what is many, what is written at once, what is a wave") {
    const kvrt_attend_view view = {4, 0, 0, 0};
    const made_plan one(view, {{4, 1000, 0}});  // 16 vectors
    CHECK(one.plan.piece_count[0] == 4);
    CHECK(one.plan.row_piece_count[0] == 0);
    const made_plan more(view, {{5, 1000, 0}});
    CHECK(more.plan.piece_count[0] == 0);
    CHECK(more.plan.row_piece_count[0] == 4);
    const made_plan prompt(view, {{600, 600, 0}});  // 19 tiles of 128 vectors
    CHECK(prompt.plan.row_piece_count[0] == 19);
    CHECK(prompt.waves[0].joined_rows == 0);
    CHECK(prompt.row_pieces[0][0].first_vector == 18 * 128);  // the one that sees most
    // Sealed blocks in front of a long prompt: parts of 512 rows, in two pieces each.
    const made_plan sealed({4, 0, 0, 1}, {{600, 700, 96}}, 1024);
    CHECK(sealed.plan.sequence_count == 2);
    CHECK(sealed.sequences[0].rows == 512);
    CHECK(sealed.sequences[0].pieces == 2);
    CHECK(sealed.plan.wave_count == 2);
    CHECK(sealed.bounds.partials == 1024);
    // Two tokens with four pieces each do not fit six partial results.
    const made_plan waves(view, {{1, 1000, 0}, {1, 1000, 0}, {1, 100, 0}}, 6);
    CHECK(waves.plan.wave_count == 2);
    CHECK(waves.waves[0].sequences == 1);
    CHECK(waves.waves[1].pieces[0] == 5);
}

namespace {

/// A step's lists in a table on the fake driver, where the next step finds them.
struct listed_plan {
    static constexpr uint64_t sequences = 0, pieces = 1024, words = 8192;

    fake_driver fake;
    kvrt::host_allocator allocator;
    device_context device;
    device_table table;

    listed_plan() {
        REQUIRE(device.open(fake.table(), 0) == KV_OK);
        REQUIRE(table.create(device, allocator, words, nullptr) == KV_OK);
    }
    void list(const made_plan& made) {
        write(sequences, made.sequences, made.plan.sequence_count);
        write(pieces, made.pieces[0], made.plan.piece_count[0]);
    }
    template <class entry>
    void write(uint64_t first, const std::vector<entry>& entries, uint32_t count) {
        table.write(first, reinterpret_cast<const uint32_t*>(entries.data()),
                    count * sizeof(entry) / sizeof(uint32_t));
    }
    std::vector<uint32_t> all() const {
        return std::vector<uint32_t>(table.words_at(0), table.words_at(0) + words);
    }
    /// From the lists of `before`, with nothing but the items of `next`.
    bool advance(const made_plan& before, const made_plan& next) {
        kvrt_attend_plan plan = before.plan;
        plan.items = next.items.data();
        plan.item_count = next.plan.item_count;
        plan.sequences = nullptr;
        plan.pieces[0] = plan.pieces[1] = nullptr;
        return advance_attention(plan, table, sequences);
    }
};

}  // namespace

TEST_CASE("plans of attention: a decode step's lists are those of the step before, with lengths") {
    std::mt19937 random(11);
    const auto below = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
    uint32_t advanced = 0, refused = 0;
    for (uint32_t round = 0; round < 400; ++round) {
        kvrt_attend_view view = {1 + below(8), 0, 0, 0};
        if (round % 3 == 1) {
            view.window = 1 + below(900);
            view.window_sinks = below(100);
        }
        std::vector<item_shape> shapes;
        for (uint32_t i = 1 + below(6); i > 0; --i) {
            const uint32_t rows = 1 + below(round % 4 == 0 ? 4 : 1);
            shapes.push_back({rows, rows + below(below(9) == 0 ? 40000 : 2000), 0});
        }
        const made_plan before(view, shapes);
        listed_plan lists;
        lists.list(before);
        bool same_pieces = before.plan.row_piece_count[0] == 0;
        for (item_shape& each : shapes) {
            const uint32_t old_slots = each.slots;
            each.slots += below(round % 5 == 0 ? 300 : 3);
            same_pieces = same_pieces && kernels::attend_piece_slots(old_slots) ==
                                             kernels::attend_piece_slots(each.slots);
            const uint32_t piece = kernels::attend_piece_slots(each.slots);
            same_pieces = same_pieces && (old_slots - 1) / piece == (each.slots - 1) / piece;
        }
        const made_plan next(view, shapes);
        const std::vector<uint32_t> untouched = lists.all();
        const bool advances = lists.advance(before, next);
        CHECK(advances == same_pieces);
        ++(advances ? advanced : refused);
        if (advances) {
            const std::vector<uint32_t> made = lists.all();
            lists.list(next);
            CHECK(lists.all() == made);
            CHECK(next.waves[0].pieces[0] == before.waves[0].pieces[0]);
        } else {
            CHECK(lists.all() == untouched);
        }
    }
    CHECK(advanced > 100);
    CHECK(refused > 50);
}

TEST_CASE("plans of attention: what is not only longer is listed anew") {
    const kvrt_attend_view view = {4, 0, 0, 0}, sealed_view = {4, 0, 0, 1};
    const auto advances = [](const kvrt_attend_view& look, const std::vector<item_shape>& from,
                             const std::vector<item_shape>& to, uint64_t most_partials = 0) {
        const made_plan before(look, from, most_partials, 1000), next(look, to, 0, 1000);
        listed_plan lists;
        lists.list(before);
        return lists.advance(before, next);
    };
    CHECK(advances(view, {{1, 100, 0}, {1, 300, 0}}, {{1, 101, 0}, {1, 301, 0}}));
    CHECK(!advances(view, {{1, 100, 0}, {1, 300, 0}}, {{1, 101, 0}}));
    CHECK(!advances(view, {{1, 100, 0}}, {{1, 101, 0}, {1, 101, 0}}));
    CHECK(!advances(view, {{1, 100, 0}}, {{2, 102, 0}}));
    CHECK(!advances(view, {{5, 100, 0}}, {{5, 105, 0}}));  // as a prompt's rows
    CHECK(!advances(view, {{1, 256, 0}}, {{1, 257, 0}}));
    CHECK(!advances(view, {{1, 257, 0}}, {{1, 256, 0}}));
    CHECK(!advances(sealed_view, {{1, 100, 64}}, {{1, 101, 64}}));
    CHECK(!advances(sealed_view, {{1, 100, 0}}, {{1, 101, 64}}));
    CHECK(advances(sealed_view, {{1, 100, 0}}, {{1, 101, 0}}));
    CHECK(!advances(view, {{1, 100, 0, 1}}, {{1, 101, 0, 1}}));  // weights are kept
    CHECK(!advances(view, {{1, 100, 0}}, {{1, 101, 0, 1}}));
    CHECK(!advances(view, {{1, 1000, 0}, {1, 900, 0}}, {{1, 1001, 0}, {1, 901, 0}}, 6));  // waves
}
