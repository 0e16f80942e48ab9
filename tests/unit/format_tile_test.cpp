// Tiles against the formulas of their formats: bytes parsed and numbers computed here in double,
// from what the formats' definitions say; what sealing may lose of each number; published sizes and
// errors.
#include <doctest/doctest.h>

#include <string>

#include "format/rotation.hpp"
#include "format_reference.hpp"

using namespace format_test;

namespace {

enum class scheme { kivi_keys, kvarn_keys, kvarn_values };

struct tile_facts {
    uint32_t id;
    const char* name;
    operand_role role;
    scheme kind;
    uint32_t bits, token_multiple;

    const kvrt::format_description& found() const { return *kvrt::find_format(id, role); }
    double last_code() const { return (1u << bits) - 1.0; }
    uint32_t words(uint32_t dim) const { return (dim * bits / 8 + 3) / 4; }
    uint32_t code_bytes(uint32_t tokens, uint32_t dim) const { return tokens * words(dim) * 4; }
    uint32_t bytes(uint32_t tokens, uint32_t dim) const {
        uint32_t numbers = 0;
        switch (kind) {
            case scheme::kivi_keys:
                numbers = tokens / 32 * dim * 2;
                break;
            case scheme::kvarn_keys:
                numbers = 2 * dim + tokens;
                break;
            case scheme::kvarn_values:
                numbers = dim + 2 * tokens;
                break;
        }
        return (code_bytes(tokens, dim) + 2 * numbers + 63) / 64 * 64;
    }
};

constexpr tile_facts all_tiles[] = {
    {KV_FORMAT_KIVI4, "kivi4", operand_role::keys, scheme::kivi_keys, 4, 32},
    {KV_FORMAT_KIVI2, "kivi2", operand_role::keys, scheme::kivi_keys, 2, 32},
    {KV_FORMAT_KVARN4, "kvarn4", operand_role::keys, scheme::kvarn_keys, 4, 64},
    {KV_FORMAT_KVARN4, "kvarn4", operand_role::values, scheme::kvarn_values, 4, 64},
    {KV_FORMAT_KVARN2, "kvarn2", operand_role::keys, scheme::kvarn_keys, 2, 64},
    {KV_FORMAT_KVARN2, "kvarn2", operand_role::values, scheme::kvarn_values, 2, 64},
};

/// A tile's rows, [tokens][dim].
struct tile_rows {
    uint32_t tokens, dim;
    std::vector<float> numbers;

    tile_rows(uint32_t token_count, uint32_t channels)
        : tokens(token_count), dim(channels), numbers(std::size_t{token_count} * channels) {}
    float& at(uint32_t token, uint32_t channel) { return numbers[token * dim + channel]; }
    float at(uint32_t token, uint32_t channel) const { return numbers[token * dim + channel]; }
    void round_to_f16() {
        for (float& x : numbers) {
            x = static_cast<float>(value_of(nearest_bits(double{x}, element::f16), element::f16));
        }
    }
};

tile_rows gauss_tile(uint32_t tokens, uint32_t dim, std::mt19937& random) {
    tile_rows rows(tokens, dim);
    rows.numbers = gauss_row(tokens * dim, random);
    return rows;
}

tile_rows key_like_tile(uint32_t tokens, uint32_t dim, std::mt19937& random) {
    tile_rows rows(tokens, dim);
    const key_like_rows source(dim, random);
    for (uint32_t t = 0; t < tokens; ++t) {
        const std::vector<float> row = source.draw(random);
        std::copy(row.begin(), row.end(), rows.numbers.begin() + t * dim);
    }
    return rows;
}

/// Bytes of a sealed tile, parsed.
struct sealed_tile {
    tile_facts format;
    uint32_t tokens, dim;
    std::vector<std::byte> bytes;

    uint32_t code(uint32_t slot, uint32_t channel) const {
        const uint32_t apart = dim * format.bits / 8, byte = channel % apart;
        const uint32_t words = format.words(dim);
        const uint32_t at = format.kind == scheme::kvarn_values
                                ? slot * words * 4 + byte
                                : ((slot / 16 * words + byte / 4) * 16 + slot % 16) * 4 + byte % 4;
        return std::to_integer<uint32_t>(bytes[at]) >> (channel / apart * format.bits) &
               ((1u << format.bits) - 1);
    }
    /// The index-th f16 number behind the codes.
    double meta(uint32_t index) const {
        return value_of(parse<uint16_t>(bytes.data() + format.code_bytes(tokens, dim) + index * 2),
                        element::f16);
    }
    double step(uint32_t slot, uint32_t channel) const {
        switch (format.kind) {
            case scheme::kivi_keys:
                return meta(slot / 32 * 2 * dim + channel);
            case scheme::kvarn_keys:
                return meta(channel);
            default:
                return meta(dim + slot);
        }
    }
    double least(uint32_t slot, uint32_t channel) const {
        switch (format.kind) {
            case scheme::kivi_keys:
                return meta(slot / 32 * 2 * dim + dim + channel);
            case scheme::kvarn_keys:
                return meta(dim + channel);
            default:
                return meta(dim + tokens + slot);
        }
    }
    double factor(uint32_t slot, uint32_t channel) const {
        switch (format.kind) {
            case scheme::kivi_keys:
                return 1.0;
            case scheme::kvarn_keys:
                return meta(2 * dim + slot);
            default:
                return meta(channel);
        }
    }
    double value(uint32_t slot, uint32_t channel) const {
        return (static_cast<double>(code(slot, channel)) * step(slot, channel) +
                least(slot, channel)) *
               factor(slot, channel);
    }
};

sealed_tile seal(const tile_facts& format, const tile_rows& rows,
                 std::byte before = std::byte{0xa5}) {
    const uint32_t bytes = format.bytes(rows.tokens, rows.dim);
    sealed_tile made{format, rows.tokens, rows.dim, {}};
    made.bytes.assign(bytes + 64, before);
    format.found().tile.seal(rows.numbers.data(), rows.tokens, rows.dim, made.bytes.data());
    for (uint32_t i = 0; i < 64; ++i) REQUIRE(made.bytes[bytes + i] == before);
    made.bytes.resize(bytes);
    return made;
}

tile_rows open(const sealed_tile& tile, uint32_t first, uint32_t count) {
    tile_rows rows(count, tile.dim);
    tile.format.found().tile.open(tile.bytes.data(), tile.tokens, tile.dim, first, count,
                                  rows.numbers.data());
    return rows;
}
tile_rows open(const sealed_tile& tile) { return open(tile, 0, tile.tokens); }

/// Slots and channels that share a step: of keys a channel, of KIVI's in 32 tokens; of values a
/// slot.
template <class callable>
void for_all_groups(const tile_facts& format, uint32_t tokens, uint32_t dim, const callable& body) {
    if (format.kind == scheme::kvarn_values) {
        for (uint32_t t = 0; t < tokens; ++t) body(t, t + 1, 0u, dim);
        return;
    }
    const uint32_t together = format.kind == scheme::kivi_keys ? 32 : tokens;
    for (uint32_t t = 0; t < tokens; t += together) {
        for (uint32_t i = 0; i < dim; ++i) body(t, t + together, i, i + 1);
    }
}

template <class callable>
void for_all_tiles(const callable& body) {
    for (const tile_facts& format : all_tiles) {
        CAPTURE(std::string(format.name));
        CAPTURE(static_cast<int>(format.role));
        for (const uint32_t dim : {32u, 64u, 72u, 80u, 96u, 128u, 256u}) {
            CAPTURE(dim);
            for (const uint32_t tokens : {32u, 64u, 128u}) {
                if (tokens % format.token_multiple != 0) continue;
                CAPTURE(tokens);
                body(format, tokens, dim);
            }
        }
    }
}

/// The factors of columns by the definition: in logarithms, the tile scaled anew in each turn.
/// [rows][columns] as number(row, column).
template <class callable>
std::vector<double> levelled_columns(uint32_t rows, uint32_t columns, const callable& number) {
    std::vector<double> log_rows(rows), log_columns(columns), best(columns);
    std::vector<double> scaled_tile(std::size_t{rows} * columns);
    const auto scaled = [&](uint32_t r, uint32_t c) { return scaled_tile[r * columns + c]; };
    const auto scale = [&] {
        for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t c = 0; c < columns; ++c) {
                scaled_tile[r * columns + c] =
                    number(r, c) * std::exp(-log_rows[r] - log_columns[c]);
            }
        }
    };
    const auto deviation = [](uint32_t count, const auto& at) {
        double mean = 0, squares = 0;
        for (uint32_t i = 0; i < count; ++i) mean += at(i) / count;
        for (uint32_t i = 0; i < count; ++i) squares += (at(i) - mean) * (at(i) - mean);
        return count < 2 ? 0.0 : std::sqrt(squares / (count - 1));
    };
    const auto of_column = [&](uint32_t c) {
        return deviation(rows, [&](uint32_t r) { return scaled(r, c); });
    };
    const auto of_row = [&](uint32_t r) {
        return deviation(columns, [&](uint32_t c) { return scaled(r, c); });
    };
    const auto imbalance = [](uint32_t count, const auto& of) {
        double least = INFINITY, largest = 0;
        for (uint32_t i = 0; i < count; ++i) {
            const double found = of(i);
            least = std::min(least, found);
            largest = std::max(largest, found);
        }
        return largest / std::max(least, 1e-8);
    };
    const auto level = [](std::vector<double>& logs, const auto& of) {
        std::vector<double> found(logs.size());
        for (uint32_t i = 0; i < logs.size(); ++i) found[i] = of(i);
        for (uint32_t i = 0; i < logs.size(); ++i) {
            logs[i] += std::log(std::clamp(found[i], 1e-3, 1e3));
            logs[i] = std::clamp(logs[i], -0.3, 10.0);
        }
    };
    double least_imbalance = INFINITY;
    for (int turn = 0; turn <= 8; ++turn) {
        if (turn > 0) {
            level(log_columns, of_column);
            scale();
            level(log_rows, of_row);
        }
        scale();
        const double now = imbalance(columns, of_column) + imbalance(rows, of_row);
        if (now <= least_imbalance) {
            least_imbalance = now;
            best = log_columns;
        }
    }
    for (double& factor : best) factor = std::exp(factor);
    return best;
}

/// Of the tokens in `finite` alone. Empty for KIVI.
std::vector<double> expected_factors(const tile_facts& format, const tile_rows& rows,
                                     const std::vector<uint32_t>& finite) {
    const uint32_t count = static_cast<uint32_t>(finite.size());
    switch (format.kind) {
        case scheme::kvarn_keys:
            return levelled_columns(rows.dim, count, [&](uint32_t r, uint32_t c) {
                return double{rows.at(finite[c], r)};
            });
        case scheme::kvarn_values:
            return levelled_columns(count, rows.dim, [&](uint32_t r, uint32_t c) {
                return double{rows.at(finite[r], c)};
            });
        default:
            return {};
    }
}

std::vector<uint32_t> all_of(uint32_t tokens) {
    std::vector<uint32_t> all(tokens);
    for (uint32_t t = 0; t < tokens; ++t) all[t] = t;
    return all;
}

/// The stored columns' factors against the definition's, but for a common one, which the rows make
/// up for: iterates that differ in no more than that are equally balanced, and rounding chooses.
void check_factors(const sealed_tile& tile, const tile_rows& rows,
                   const std::vector<uint32_t>& finite) {
    const std::vector<double> expected = expected_factors(tile.format, rows, finite);
    double common = 0;
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < expected.size(); ++i) {
        const double stored =
            tile.format.kind == scheme::kvarn_keys ? tile.factor(finite[i], 0) : tile.factor(0, i);
        if (i == 0) common = stored / expected[0];
        wrong += !(std::abs(stored - expected[i] * common) <= stored * 0x1p-10);
        wrong += !(stored > 0.74 && stored < 22030);
    }
    CHECK(wrong == 0);
}

/// Each group's least number from below and its steps as wide as they must be, so that every number
/// is within half a step of its code's; and what opening makes of it.
void check_groups(const sealed_tile& tile, const tile_rows& rows) {
    uint32_t wrong_least = 0, wrong_step = 0, beyond = 0;
    for_all_groups(
        tile.format, tile.tokens, tile.dim,
        [&](uint32_t t0, uint32_t t1, uint32_t i0, uint32_t i1) {
            double least = INFINITY, largest = -INFINITY, size = 0;
            for (uint32_t t = t0; t < t1; ++t) {
                for (uint32_t i = i0; i < i1; ++i) {
                    const double x = double{rows.at(t, i)} / tile.factor(t, i);
                    least = std::min(least, x);
                    largest = std::max(largest, x);
                    size = std::max(size, std::abs(x));
                }
            }
            const double noise = size * 0x1p-22;  // of dividing in f32
            least = std::clamp(least, -65504.0, 65504.0);
            const double stored = tile.least(t0, i0), step = tile.step(t0, i0);
            const double below = std::max(std::abs(least) * 0x1p-10, 0x1p-24);  // next f16 number
            wrong_least += !(stored <= least + noise && stored >= least - below - noise);
            const double exact = (largest - stored) / tile.format.last_code();
            wrong_step += !(std::abs(step - exact) <= std::max(exact * 0x1p-11, 0x1p-24) + noise);
            for (uint32_t t = t0; t < t1; ++t) {
                for (uint32_t i = i0; i < i1; ++i) {
                    const double off = std::abs(tile.value(t, i) - double{rows.at(t, i)});
                    beyond += !(off <= (step / 2 * (1 + 1e-5) + noise) * tile.factor(t, i));
                }
            }
        });
    CHECK(wrong_least == 0);
    CHECK(wrong_step == 0);
    CHECK(beyond == 0);
}

void check_opened(const sealed_tile& tile) {
    const tile_rows opened = open(tile);
    uint32_t wrong = 0;
    for (uint32_t t = 0; t < tile.tokens; ++t) {
        for (uint32_t i = 0; i < tile.dim; ++i) {
            const double exact = tile.value(t, i);
            const double size = (static_cast<double>(tile.code(t, i)) * std::abs(tile.step(t, i)) +
                                 std::abs(tile.least(t, i))) *
                                std::abs(tile.factor(t, i));
            if (!std::isfinite(exact)) {
                wrong += std::isfinite(opened.at(t, i));
            } else {
                wrong += !(std::abs(double{opened.at(t, i)} - exact) <= size * 0x1p-22 + 0x1p-149);
            }
        }
    }
    CHECK(wrong == 0);
}

void check_tile(const tile_facts& format, const tile_rows& rows) {
    const sealed_tile tile = seal(format, rows);
    check_factors(tile, rows, all_of(rows.tokens));
    check_groups(tile, rows);
    check_opened(tile);
    CHECK(seal(format, rows, std::byte{0}).bytes == tile.bytes);
}

void rotate(tile_rows& rows) {
    for (uint32_t t = 0; t < rows.tokens; ++t) kvrt::rotate_row(&rows.at(t, 0), rows.dim);
}

}  // namespace

TEST_CASE("the library describes its tiles as the reference does") {
    for (const tile_facts& format : all_tiles) {
        CAPTURE(std::string(format.name));
        const kvrt::format_description* found = kvrt::find_format(format.id, format.role);
        REQUIRE(found != nullptr);
        CHECK(found->id == format.id);
        CHECK(std::string(found->name) == format.name);
        CHECK(found->kind == kvrt::format_class::tile_local);
        CHECK(found->code_bits == format.bits);
        CHECK(found->always_rotated == (format.kind != scheme::kivi_keys));
        CHECK(found->tile.token_multiple == format.token_multiple);
        CHECK((found->encode == nullptr && found->decode == nullptr));
        for (const uint32_t tokens : {32u, 64u, 128u}) {
            for (uint32_t dim = 32; dim <= 256; dim += 8) {
                CHECK(found->tile.bytes(tokens, dim) == format.bytes(tokens, dim));
            }
        }
    }
    // Published: bytes of a token's keys, its values beside them, and of a whole block.
    const auto bytes = [](uint32_t id, operand_role role, uint32_t tokens) {
        return kvrt::find_format(id, role)->tile.bytes(tokens, 128);
    };
    for (const uint32_t tokens : {32u, 64u, 128u}) {
        CHECK(bytes(KV_FORMAT_KIVI4, operand_role::keys, tokens) == (160 - 80) * tokens);
        CHECK(bytes(KV_FORMAT_KIVI2, operand_role::keys, tokens) == (96 - 48) * tokens);
    }
    CHECK(bytes(KV_FORMAT_KVARN4, operand_role::keys, 128) +
              bytes(KV_FORMAT_KVARN4, operand_role::values, 128) ==
          17920);
}

TEST_CASE("a tile worked out by hand") {
    // Two channels of KIVI: one from 0 to 15.5 by halves, one of -2 but for a 1.
    tile_rows rows(32, 32);
    for (uint32_t t = 0; t < 32; ++t) {
        rows.at(t, 0) = 0.5f * static_cast<float>(t);
        rows.at(t, 17) = t == 20 ? 1.0f : -2.0f;
    }
    const sealed_tile tile = seal(all_tiles[0], rows);
    REQUIRE(tile.bytes.size() == 32 * 16 + 4 * 32);
    // Channel 17 is the high nibble of byte 1; slot 20 is the fifth of the second 16, whose first
    // words start at 16 * 4 words * 4 bytes.
    CHECK(std::to_integer<uint32_t>(tile.bytes[256 + 4 * 4 + 1]) == 0xf0);
    CHECK(std::to_integer<uint32_t>(tile.bytes[256 + 3 * 4 + 1]) == 0x00);
    // Steps of 31/30: 15.5 is code 15, 10 is code 10 of 9.68, and -2 and 1 are 15 steps of 0.2.
    CHECK(std::to_integer<uint32_t>(tile.bytes[256 + 15 * 4]) == 15);
    CHECK(std::to_integer<uint32_t>(tile.bytes[256 + 4 * 4]) == 10);
    CHECK(parse<uint16_t>(tile.bytes.data() + 512) == nearest_bits(31.0 / 30, element::f16));
    CHECK(parse<uint16_t>(tile.bytes.data() + 512 + 34) == nearest_bits(0.2, element::f16));
    CHECK(parse<uint16_t>(tile.bytes.data() + 576 + 34) == 0xc000);
    CHECK(parse<uint16_t>(tile.bytes.data() + 576) == 0);
}

TEST_CASE("ordinary tiles: factors and metadata as defined, every number within half a step") {
    std::mt19937 random(51);
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        check_tile(format, gauss_tile(tokens, dim, random));
        tile_rows keys = key_like_tile(tokens, dim, random);
        check_tile(format, keys);
        rotate(keys);
        check_tile(format, keys);
        tile_rows stored = key_like_tile(tokens, dim, random);
        stored.round_to_f16();
        check_tile(format, stored);
        tile_rows uneven = gauss_tile(tokens, dim, random);
        for (uint32_t t = 0; t < tokens; ++t) {
            for (uint32_t i = 0; i < dim; ++i) {
                uneven.at(t, i) *= std::exp2(static_cast<float>(t % 7) + static_cast<float>(i % 5));
            }
        }
        check_tile(format, uneven);
    });
}

TEST_CASE("unusual tiles: constants, outliers, numbers near the ends of f16") {
    std::mt19937 random(52);
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        if (dim != 32 && dim != 72 && dim != 128) return;
        for (const float constant : {1.0f, -2.5f, 1000.0f, 6e-8f, 65504.0f, -48000.0f, 0.1f}) {
            CAPTURE(constant);
            tile_rows rows(tokens, dim);
            std::fill(rows.numbers.begin(), rows.numbers.end(), constant);
            check_tile(format, rows);
            for (const float x : open(seal(format, rows)).numbers) {
                REQUIRE(std::abs(x - constant) <= std::abs(constant) * 0x1p-10f + 0x1p-24f);
            }
        }
        // Constant channels and constant tokens among others.
        tile_rows rows = gauss_tile(tokens, dim, random);
        for (uint32_t t = 0; t < tokens; ++t) rows.at(t, 5) = 0.0f;
        for (uint32_t t = 0; t < tokens; ++t) rows.at(t, 7) = 100.3f;
        for (uint32_t i = 0; i < dim; ++i) rows.at(tokens / 2, i) = 0.0f;
        check_tile(format, rows);
        rows = gauss_tile(tokens, dim, random);
        for (float& x : rows.numbers) x *= 0x1p-20f;  // f16's subnormals
        rows.round_to_f16();
        check_tile(format, rows);
        rows = gauss_tile(tokens, dim, random);
        for (float& x : rows.numbers) x *= 1e-42f;  // f32's
        check_tile(format, rows);
        for (const float outlier : {100.0f, -60000.0f, 65504.0f}) {
            rows = gauss_tile(tokens, dim, random);
            rows.at(tokens - 3, dim - 2) = outlier;
            check_tile(format, rows);
        }
        // The whole reach of f16.
        std::uniform_real_distribution<float> anywhere(-65504.0f, 65504.0f);
        for (float& x : rows.numbers) x = anywhere(random);
        check_tile(format, rows);
        for (float& x : rows.numbers) x = random() % 2 == 0 ? -65504.0f : 65504.0f;
        check_tile(format, rows);
    });
}

TEST_CASE("tiles of zeros come back as zeros") {
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        for (const float x : open(seal(format, tile_rows(tokens, dim))).numbers) {
            REQUIRE(x == 0.0f);
        }
    });
}

TEST_CASE("beyond f16: metadata stay finite, the nearest is kept") {
    std::mt19937 random(53);
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        for (const float outlier : {1e6f, -1e6f, 1e30f, -1e30f, 3.4e38f, -3.4e38f}) {
            CAPTURE(outlier);
            tile_rows rows = gauss_tile(tokens, dim, random);
            rows.at(9, 3) = outlier;
            if (outlier == 3.4e38f) rows.at(10, 3) = -outlier;
            const sealed_tile tile = seal(format, rows);
            check_opened(tile);
            const tile_rows opened = open(tile);
            for (const float x : opened.numbers) REQUIRE(std::isfinite(x));
            CHECK(std::signbit(opened.at(9, 3)) == std::signbit(outlier));
            CHECK(std::abs(opened.at(9, 3)) > 60000.0f);
        }
    });
}

TEST_CASE("NaN and infinity: a channel of 32 tokens in KIVI's tiles, a token in KVarN's") {
    std::mt19937 random(54);
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        const bool kivi = format.kind == scheme::kivi_keys;
        for (const uint32_t place : {0u, tokens / 2 + 1, tokens - 1}) {
            CAPTURE(place);
            const tile_rows clean = gauss_tile(tokens, dim, random);
            std::vector<std::byte> first_bytes;
            for (const float flaw : {NAN, -NAN, INFINITY, -INFINITY}) {
                tile_rows rows = clean;
                rows.at(place, 5) = flaw;
                const sealed_tile tile = seal(format, rows);
                if (!first_bytes.empty()) {  // which flaw it was does not show
                    CHECK(tile.bytes == first_bytes);
                    continue;
                }
                first_bytes = tile.bytes;
                const tile_rows opened = open(tile);
                uint32_t wrong = 0;
                for (uint32_t t = 0; t < tokens; ++t) {
                    for (uint32_t i = 0; i < dim; ++i) {
                        const bool reached = kivi ? t / 32 == place / 32 && i == 5 : t == place;
                        if (reached) {
                            wrong += !std::isnan(opened.at(t, i));
                            continue;
                        }
                        const double off = std::abs(tile.value(t, i) - double{clean.at(t, i)});
                        wrong += !(off <= tile.step(t, i) * tile.factor(t, i) * 0.50001);
                    }
                }
                CHECK(wrong == 0);
                if (kivi) continue;
                std::vector<uint32_t> finite = all_of(tokens);
                finite.erase(finite.begin() + place);
                check_factors(tile, rows, finite);
            }
        }
        // All but one token, and all of them.
        tile_rows rows = gauss_tile(tokens, dim, random);
        for (uint32_t t = 0; t < tokens; ++t) {
            if (t != 17) rows.at(t, t % dim) = NAN;
        }
        const tile_rows alone = open(seal(format, rows));
        for (uint32_t i = 0; i < dim && !kivi; ++i) {
            REQUIRE(std::abs(alone.at(17, i) - rows.at(17, i)) < 1.2f);
        }
        std::fill(rows.numbers.begin(), rows.numbers.end(), -INFINITY);
        for (const float x : open(seal(format, rows)).numbers) REQUIRE(std::isnan(x));
    });
}

TEST_CASE("every byte opens by the formula, and part of a tile as the whole") {
    std::mt19937 random(55);
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        sealed_tile tile{format, tokens, dim, std::vector<std::byte>(format.bytes(tokens, dim))};
        for (std::byte& byte : tile.bytes) byte = static_cast<std::byte>(random());
        check_opened(tile);
        const tile_rows whole = open(tile);
        const auto check_part = [&](uint32_t first, uint32_t count) {
            const tile_rows part = open(tile, first, count);
            CHECK(std::memcmp(part.numbers.data(), whole.numbers.data() + first * dim,
                              part.numbers.size() * sizeof(float)) == 0);
        };
        for (uint32_t first = 0; first < tokens; first += 16) check_part(first, 16);
        for (uint32_t turn = 0; turn < 20; ++turn) {
            const uint32_t first = static_cast<uint32_t>(random()) % tokens;
            check_part(first, 1 + static_cast<uint32_t>(random()) % (tokens - first));
        }
    });
}

TEST_CASE("rows of an opened KIVI tile are sealed again within half a step") {
    std::mt19937 random(56);
    for_all_tiles([&](const tile_facts& format, uint32_t tokens, uint32_t dim) {
        if (format.kind != scheme::kivi_keys) return;
        const sealed_tile once = seal(format, key_like_tile(tokens, dim, random));
        const tile_rows rows = open(once);
        const sealed_tile twice = seal(format, rows);
        uint32_t wrong = 0;
        for (uint32_t t = 0; t < tokens; ++t) {
            for (uint32_t i = 0; i < dim; ++i) {
                const double off = std::abs(twice.value(t, i) - double{rows.at(t, i)});
                wrong += !(off <= twice.step(t, i) / 2);
                wrong += !(twice.step(t, i) <= once.step(t, i) * (1 + 0x1p-9));
            }
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("errors of tiles stay at their floors") {
    struct floor_of_error {
        tile_facts format;
        double gauss, keys;  // 0: none published
    };
    constexpr uint32_t tokens = 128, dim = 128, tiles = 32;
    for (const floor_of_error& floor : {floor_of_error{all_tiles[0], 0.0783, 0.0304},
                                        floor_of_error{all_tiles[1], 0.3930, 0.1527},
                                        floor_of_error{all_tiles[2], 0.0990, 0.0373}}) {
        CAPTURE(std::string(floor.format.name));
        std::mt19937 random(57);
        const auto relative_error = [&](bool key_like) {
            double error = 0, size = 0;
            const key_like_rows source(dim, random);
            for (uint32_t n = 0; n < tiles; ++n) {
                tile_rows rows(tokens, dim);
                for (uint32_t t = 0; t < tokens; ++t) {
                    const std::vector<float> row =
                        key_like ? source.draw(random) : gauss_row(dim, random);
                    std::copy(row.begin(), row.end(), rows.numbers.begin() + t * dim);
                }
                if (floor.format.kind != scheme::kivi_keys) rotate(rows);
                const sealed_tile tile = seal(floor.format, rows);
                for (uint32_t t = 0; t < tokens; ++t) {
                    for (uint32_t i = 0; i < dim; ++i) {
                        const double x = double{rows.at(t, i)}, off = tile.value(t, i) - x;
                        error += off * off;
                        size += x * x;
                    }
                }
            }
            return std::sqrt(error / size);
        };
        CHECK(relative_error(false) == doctest::Approx(floor.gauss).epsilon(0.02));
        CHECK(relative_error(true) == doctest::Approx(floor.keys).epsilon(0.05));
    }
}

TEST_CASE("levelled columns spare a row the outliers of one column") {
    // One token of keys 40 times as large; one channel of values.
    std::mt19937 random(58);
    for (const tile_facts& format : {all_tiles[2], all_tiles[3]}) {
        tile_rows rows = gauss_tile(128, 128, random), even = rows;
        for (uint32_t k = 0; k < 128; ++k) {
            (format.kind == scheme::kvarn_keys ? rows.at(31, k) : rows.at(k, 31)) *= 40.0f;
        }
        const auto error = [&](const tile_rows& given) {
            const tile_rows back = open(seal(format, given));
            double sum = 0;
            for (uint32_t t = 0; t < 128; ++t) {
                for (uint32_t i = 0; i < 128; ++i) {
                    if (t == 31 || i == 31) continue;
                    const double off = double{back.at(t, i)} - double{given.at(t, i)};
                    sum += off * off;
                }
            }
            return std::sqrt(sum);
        };
        CHECK(error(rows) < 1.1 * error(even));
    }
}
