// Tiles against the formulas of their formats (format_tile_reference.hpp): what sealing may lose of
// each number; published sizes and errors.
#include "format_tile_reference.hpp"

using namespace format_test;

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
