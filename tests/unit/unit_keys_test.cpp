// KeyDiff and redundancy against their definitions in double.
#include "retention/unit_keys.hpp"

#include "scorer_fixture.hpp"

using namespace scorer_test;

namespace {

// Directions of all keys of a head, [slot][dim]; 0 for keys of 0.
std::vector<double> directions(const row_set& set, uint32_t head) {
    std::vector<double> units;
    for (uint32_t slot = 0; slot < set.slots; ++slot) {
        const double* key = set.row(false, slot, head);
        const double norm = std::sqrt(dot(key, key, set.dims[0]));
        for (uint32_t i = 0; i < set.dims[0]; ++i) {
            units.push_back(norm == 0 ? 0.0 : key[i] / norm);
        }
    }
    return units;
}

// The sum over all slots, from parts of `part` slots.
std::vector<double> summed(const row_set& set, uint32_t head, uint32_t part) {
    const uint32_t dim = set.dims[0], parts = (set.slots + part - 1) / part;
    std::vector<double> sums(std::size_t{parts} * dim);
    for (uint32_t p = 0; p < parts; ++p) {
        sum_unit_keys(set.view(head), p * part, std::min((p + 1) * part, set.slots),
                      sums.data() + p * dim);
    }
    join_parts(sums.data(), parts, dim, sums.data());
    sums.resize(dim);
    return sums;
}

struct compared {
    std::vector<float> row_sum, cosine, redundancy;
    std::vector<uint32_t> latest;
};

compared compare(const row_set& set, uint32_t head, float threshold, uint32_t cut) {
    const uint32_t slots = set.slots, dim = set.dims[0];
    const uint64_t count = unit_copy_count(slots, dim);
    std::vector<float> memory(count + 16, NAN);
    float* units = memory.data();
    while (reinterpret_cast<uintptr_t>(units) % 64 != 0) ++units;
    compared out;
    out.row_sum.assign(slots, NAN);
    out.cosine.assign(slots, NAN);
    out.redundancy.assign(slots, NAN);
    out.latest.assign(slots, 12345678);
    for (uint32_t first = 0; first < slots; first += cut) {
        copy_unit_keys(set.view(head), first, std::min(first + cut, slots), units,
                       out.row_sum.data());
    }
    for (uint32_t first = 0; first < slots; first += cut) {
        compare_unit_keys(units, slots, dim, first, std::min(first + cut, slots), threshold,
                          out.row_sum.data() + 0, out.latest.data(), out.cosine.data());
    }
    join_redundancy(slots, out.row_sum.data(), out.latest.data(), out.cosine.data(),
                    out.redundancy.data());
    return out;
}

// Keys that come again, a little changed, so that there is something to spare; and some of 0.
row_set repeating(const storage& how, uint32_t slots, uint32_t dim, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> prototypes(slots / 6 + 1);
    for (auto& row : prototypes) {
        for (uint32_t i = 0; i < dim; ++i) row.push_back(normal(random));
    }
    return row_set(how, slots, dim, 32, [&](bool value) {
        std::vector<float> row(value ? 32 : dim, 0.0f);
        if (value || random() % 23 == 0) return row;
        const auto& prototype = prototypes[random() % prototypes.size()];
        const float size = std::exp(normal(random));
        for (uint32_t i = 0; i < dim; ++i) row[i] = size * (prototype[i] + 0.6f * normal(random));
        return row;
    });
}

}  // namespace

TEST_CASE("KeyDiff and linear redundancy, in every kind of storage") {
    for_each_row_set(117, 64, 32, [](const row_set& set) {
        const uint32_t slots = set.slots, dim = set.dims[0];
        for (uint32_t head = 0; head < row_set::heads; ++head) {
            const std::vector<double> units = directions(set, head);
            std::vector<double> anchor(dim);
            for (std::size_t i = 0; i < units.size(); ++i) anchor[i % dim] += units[i] / slots;
            const double length = std::sqrt(dot(anchor.data(), anchor.data(), dim));

            const std::vector<double> total = summed(set, head, 48);
            for (uint32_t i = 0; i < dim; ++i) {
                CHECK(std::abs(total[i] / slots - anchor[i]) < 1e-7);
            }
            std::vector<float> keydiff(slots + 2, 3.0f), redundancy(slots + 2, 3.0f);
            score_keydiff(set.view(head), 0, slots, total.data(), keydiff.data());
            score_linear_redundancy(set.view(head), 0, 64, total.data(), slots, redundancy.data());
            score_linear_redundancy(set.view(head), 64, slots, total.data(), slots,
                                    redundancy.data());
            for (uint32_t j = 0; j < slots; ++j) {
                const double* unit = units.data() + std::size_t{j} * dim;
                CHECK(std::abs(keydiff[j] + dot(unit, anchor.data(), dim) / length) < 2e-6);
                double mean = 0;
                for (uint32_t i = 0; i < slots; ++i) {
                    if (i != j) mean += dot(unit, units.data() + std::size_t{i} * dim, dim) / slots;
                }
                CHECK(std::abs(redundancy[j] - mean) < 1e-6);
            }
            CHECK(keydiff[slots] == 3.0f);
            CHECK(redundancy[slots] == 3.0f);
        }
    });
}

TEST_CASE("KeyDiff by hand: the odd one out stays, and keys of 0 are across to all") {
    // Directions (1,0), (1,0), (0,1), 0: anchor (2,1) / 4.
    const float keys[4][2] = {{5, 0}, {0.25f, 0}, {0, 3}, {0, 0}};
    uint32_t drawn = 0;
    const row_set set({}, 4, 32, 32, [&](bool value) {
        std::vector<float> row(32, 0.0f);
        if (!value) {
            const uint32_t slot = drawn++ / row_set::heads;
            row[3] = keys[slot][0];
            row[9] = keys[slot][1];
        }
        return row;
    });
    on_every_target([&] {
        const std::vector<double> total = summed(set, 0, 16);
        CHECK(total[3] == doctest::Approx(2));
        CHECK(total[9] == doctest::Approx(1));
        float scores[4];
        score_keydiff(set.view(0), 0, 4, total.data(), scores);
        CHECK(scores[0] == doctest::Approx(-2 / std::sqrt(5.0)));
        CHECK(scores[1] == doctest::Approx(-2 / std::sqrt(5.0)));
        CHECK(scores[2] == doctest::Approx(-1 / std::sqrt(5.0)));
        CHECK(scores[3] == 0.0f);
        score_linear_redundancy(set.view(0), 0, 4, total.data(), 4, scores);
        CHECK(scores[0] == doctest::Approx(0.25));
        CHECK(scores[2] == doctest::Approx(0.0));
        CHECK(scores[3] == 0.0f);
        // No direction at all: the cosine with it is 0.
        const std::vector<double> nothing(32, 0.0);
        score_keydiff(set.view(0), 0, 4, nothing.data(), scores);
        for (float score : scores) CHECK(score == 0.0f);
    });
}

TEST_CASE("keys that are not finite have no part in the sum of directions, and score below all") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (const float odd : {NAN, infinity, -infinity}) {
        uint32_t drawn = 0;
        const row_set set({}, 3, 32, 32, [&](bool value) {
            std::vector<float> row(32, 0.0f);
            if (!value) {
                const uint32_t slot = drawn++ / row_set::heads;
                row[3] = 2.0f;
                row[9] = slot == 1 ? odd : 0.0f;
            }
            return row;
        });
        on_every_target([&] {
            const std::vector<double> total = summed(set, 0, 16);
            CHECK(total[3] == doctest::Approx(2));
            CHECK(total[9] == 0);
            float scores[3];
            score_keydiff(set.view(0), 0, 3, total.data(), scores);
            CHECK(scores[0] == doctest::Approx(-1));
            CHECK(std::isnan(scores[1]));
            CHECK(scores[2] == doctest::Approx(-1));
        });
    }
}

TEST_CASE("sums of directions do not depend on sealed blocks or on what lies behind the end") {
    const storage f16{tile_order::native, 32, KV_FORMAT_F16, KV_FORMAT_F16};
    const auto rows = [](uint32_t seed) {
        return [seed, draw = std::mt19937(seed)](bool value) mutable {
            std::normal_distribution<float> normal;
            std::vector<float> row(32);
            for (float& x : row) x = normal(draw);
            return value ? std::vector<float>(32) : row;
        };
    };
    const row_set whole(f16, 90, 32, 32, rows(7)), cut(f16, 90, 32, 32, rows(7), f16, 64);
    on_every_target([&] {
        CHECK(summed(whole, 1, 2048) == summed(cut, 1, 2048));
        // Slots 37 and on may hold anything.
        row_set spoiled(f16, 90, 32, 32, rows(7));
        std::vector<double> sums(32), again(32);
        sum_unit_keys(spoiled.view(1), 0, 37, sums.data());
        for (uint32_t slot = 37; slot < 48; ++slot) {
            std::byte* block = block_address(spoiled.arena, spoiled.blocks[slot / 32]);
            for (uint32_t i = 0; i < 32; ++i) {
                store_element(block + spoiled.open.keys.at(slot % 32, 1, i), element::f16, NAN);
            }
        }
        sum_unit_keys(spoiled.view(1), 0, 37, again.data());
        CHECK(sums == again);
    });
}

TEST_CASE("exact redundancy spares the newest copy in each row") {
    std::mt19937 random(11);
    for (const storage& how : {storage{tile_order::native, 16, KV_FORMAT_F32, KV_FORMAT_F32},
                               storage{tile_order::nhd, 16, KV_FORMAT_F16, KV_FORMAT_F32},
                               storage{tile_order::native, 32, KV_FORMAT_Q8_0, KV_FORMAT_F32}}) {
        for (uint32_t slots : {1u, 7u, 139u, 160u}) {
            const row_set set = repeating(how, slots, 64, random);
            CAPTURE(slots);
            on_every_target([&] {
                for (uint32_t head = 0; head < row_set::heads; ++head) {
                    const std::vector<double> units = directions(set, head);
                    const compared out = compare(set, head, 0.5f, 4096);
                    std::vector<double> columns(slots), row_sum(slots);
                    uint32_t spared = 0;
                    bool near_threshold = false;
                    for (uint32_t i = 0; i < slots; ++i) {
                        std::vector<double> cosines(slots);
                        uint32_t latest = no_slot;
                        for (uint32_t j = 0; j < slots; ++j) {
                            if (j == i) continue;
                            cosines[j] = dot(units.data() + std::size_t{i} * 64,
                                             units.data() + std::size_t{j} * 64, 64);
                            near_threshold |= std::abs(cosines[j] - 0.5) < 1e-6;
                            row_sum[i] += cosines[j];
                            if (cosines[j] > 0.5) latest = j;
                        }
                        CHECK(out.latest[i] == latest);
                        if (latest != no_slot) {
                            CHECK(std::abs(out.cosine[i] - cosines[latest]) < 1e-6);
                            cosines[latest] = 0;
                            ++spared;
                        }
                        for (uint32_t j = 0; j < slots; ++j) columns[j] += cosines[j] / slots;
                    }
                    REQUIRE_FALSE(near_threshold);  // else the draw proves nothing
                    CHECK((slots < 100 || spared > slots / 2));
                    for (uint32_t j = 0; j < slots; ++j) {
                        CHECK(std::abs(out.row_sum[j] - row_sum[j]) < 1e-4);
                        CHECK(std::abs(out.redundancy[j] - columns[j]) < 2e-6);
                    }
                    // Rows do not depend on how they are cut.
                    for (uint32_t cut : {16u, 48u}) {
                        const compared pieces = compare(set, head, 0.5f, cut);
                        CHECK(pieces.row_sum == out.row_sum);
                        CHECK(pieces.latest == out.latest);
                        CHECK(pieces.redundancy == out.redundancy);
                    }
                }
            });
        }
    }
}

TEST_CASE("exact redundancy: keys that are not finite have none, and are compared with no other") {
    for (const float odd : {NAN, INFINITY, -INFINITY}) {
        // Of 20 keys, the first 16 in pairs of opposites, slot 18 is odd in one of two sets.
        const auto keys = [](float at_18) {
            return [at_18, drawn = 0u](bool value) mutable {
                std::vector<float> row(32, 0.0f);
                if (value) return row;
                const uint32_t slot = drawn++ / row_set::heads;
                row[slot / 2 % 8] = slot % 2 == 0 ? 3.0f : -2.0f;
                if (slot == 18) row[1] = at_18;
                if (slot == 18 && at_18 == 0.0f) row.assign(32, 0.0f);
                return row;
            };
        };
        const row_set without({}, 20, 32, 32, keys(0.0f)), with({}, 20, 32, 32, keys(odd));
        on_every_target([&] {
            const compared expected = compare(without, 0, 0.5f, 16),
                           out = compare(with, 0, 0.5f, 16);
            for (uint32_t slot = 0; slot < 20; ++slot) {
                CAPTURE(slot);
                CHECK(out.latest[slot] == expected.latest[slot]);
                if (slot == 18) {
                    CHECK(std::isnan(out.redundancy[slot]));
                    continue;
                }
                CHECK(out.row_sum[slot] == expected.row_sum[slot]);
                CHECK(out.redundancy[slot] == expected.redundancy[slot]);
            }
            CHECK(expected.latest[0] == 16);  // the same direction
            CHECK(out.redundancy[16] != 0.0f);
        });
    }
}

TEST_CASE("a long row's sum") {
    // More columns than are summed at once, with a threshold that none reaches.
    std::mt19937 random(2);
    const row_set set({}, 2600, 32, 32, drawn_rows(32, 32, random));
    const std::vector<double> units = directions(set, 0);
    const compared out = compare(set, 0, 1.5f, 512);
    for (uint32_t i : {0u, 1023u, 1024u, 2599u}) {
        double sum = 0;
        for (uint32_t j = 0; j < 2600; ++j) {
            if (j != i) sum += dot(units.data() + i * 32, units.data() + j * 32, 32);
        }
        CHECK(close(double{out.row_sum[i]}, sum, 1e-5, 1.0));
        CHECK(out.latest[i] == no_slot);
        CHECK(out.redundancy[i] == doctest::Approx(sum / 2600).epsilon(1e-5));
    }
}
