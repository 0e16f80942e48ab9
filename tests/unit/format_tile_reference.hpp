// The reference of tiles: bytes parsed and numbers computed in double, from what the formats'
// definitions say.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "format/rotation.hpp"
#include "format_reference.hpp"

namespace format_test {

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

inline constexpr tile_facts all_tiles[] = {
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

inline tile_rows gauss_tile(uint32_t tokens, uint32_t dim, std::mt19937& random) {
    tile_rows rows(tokens, dim);
    rows.numbers = gauss_row(tokens * dim, random);
    return rows;
}

inline tile_rows key_like_tile(uint32_t tokens, uint32_t dim, std::mt19937& random) {
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

inline sealed_tile seal(const tile_facts& format, const tile_rows& rows,
                        std::byte before = std::byte{0xa5}) {
    const uint32_t bytes = format.bytes(rows.tokens, rows.dim);
    sealed_tile made{format, rows.tokens, rows.dim, {}};
    made.bytes.assign(bytes + 64, before);
    format.found().tile.seal(rows.numbers.data(), rows.tokens, rows.dim, made.bytes.data());
    for (uint32_t i = 0; i < 64; ++i) REQUIRE(made.bytes[bytes + i] == before);
    made.bytes.resize(bytes);
    return made;
}

inline tile_rows open(const sealed_tile& tile, uint32_t first, uint32_t count) {
    tile_rows rows(count, tile.dim);
    tile.format.found().tile.open(tile.bytes.data(), tile.tokens, tile.dim, first, count,
                                  rows.numbers.data());
    return rows;
}
inline tile_rows open(const sealed_tile& tile) { return open(tile, 0, tile.tokens); }

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
inline std::vector<double> expected_factors(const tile_facts& format, const tile_rows& rows,
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

inline std::vector<uint32_t> all_of(uint32_t tokens) {
    std::vector<uint32_t> all(tokens);
    for (uint32_t t = 0; t < tokens; ++t) all[t] = t;
    return all;
}

/// The stored columns' factors against the definition's, but for a common one, which the rows make
/// up for: iterates that differ in no more than that are equally balanced, and rounding chooses.
inline void check_factors(const sealed_tile& tile, const tile_rows& rows,
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
inline void check_groups(const sealed_tile& tile, const tile_rows& rows) {
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

inline void check_opened(const sealed_tile& tile) {
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

inline void check_tile(const tile_facts& format, const tile_rows& rows) {
    const sealed_tile tile = seal(format, rows);
    check_factors(tile, rows, all_of(rows.tokens));
    check_groups(tile, rows);
    check_opened(tile);
    CHECK(seal(format, rows, std::byte{0}).bytes == tile.bytes);
}

inline void rotate(tile_rows& rows) {
    for (uint32_t t = 0; t < rows.tokens; ++t) kvrt::rotate_row(&rows.at(t, 0), rows.dim);
}

}  // namespace format_test
