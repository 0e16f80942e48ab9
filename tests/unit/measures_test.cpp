// Norms and ranges of rows against their definition on what is stored.
#include "retention/measures.hpp"

#include "scorer_fixture.hpp"

using namespace scorer_test;

TEST_CASE("norms and ranges of rows, in every kind of storage") {
    constexpr uint32_t slots = 101, key_dim = 64, value_dim = 96;
    for_each_row_set(slots, key_dim, value_dim, [](const row_set& set) {
        for (uint32_t head = 0; head < row_set::heads; ++head) {
            std::vector<float> out[3];
            for (auto& row : out) row.assign(slots + 4, -5.0f);
            measure_slots(set.view(head), 0, slots, {out[0].data(), out[1].data(), out[2].data()});
            for (uint32_t slot = 0; slot < slots; ++slot) {
                const double* k = set.row(false, slot, head);
                const double* v = set.row(true, slot, head);
                const auto extremes = std::minmax_element(v, v + value_dim);
                CHECK(close(double{out[0][slot]}, std::sqrt(dot(k, k, key_dim)), 1e-6));
                CHECK(close(double{out[1][slot]}, std::sqrt(dot(v, v, value_dim)), 1e-6));
                CHECK(close(double{out[2][slot]}, *extremes.second - *extremes.first, 1e-6));
            }
            for (const auto& row : out) {
                for (uint32_t slot = slots; slot < slots + 4; ++slot) CHECK(row[slot] == -5.0f);
            }
            // In pieces, and one by one: the same bits.
            for (int which = 0; which < 3; ++which) {
                std::vector<float> alone(slots, -5.0f);
                slot_measures one;
                (which == 0   ? one.key_norm
                 : which == 1 ? one.value_norm
                              : one.value_range) = alone.data();
                measure_slots(set.view(head), 0, 48, one);
                measure_slots(set.view(head), 48, slots, one);
                for (uint32_t slot = 0; slot < slots; ++slot) {
                    CHECK(alone[slot] == out[which][slot]);
                }
            }
        }
    });
}

TEST_CASE("an operand that nothing is asked of is not read") {
    std::mt19937 random(1);
    row_set set({}, 20, 32, 32, drawn_rows(32, 32, random));
    std::vector<float> norms(20);
    tile_layout keys_alone = set.open;
    keys_alone.values.offset = int64_t{1} << 50;  // nowhere
    stored_rows rows = set.view(0);
    rows.open = &keys_alone;
    measure_slots(rows, 0, 20, {norms.data(), nullptr, nullptr});
    CHECK(close(double{norms[3]}, std::sqrt(dot(set.row(false, 3, 0), set.row(false, 3, 0), 32)),
                1e-6));
    tile_layout values_alone = set.open;
    values_alone.keys.offset = int64_t{1} << 50;
    rows.open = &values_alone;
    measure_slots(rows, 0, 20, {nullptr, norms.data(), nullptr});
    CHECK(close(double{norms[3]}, std::sqrt(dot(set.row(true, 3, 0), set.row(true, 3, 0), 32)),
                1e-6));
}
