// Writing rows as records: every byte of the arena against records encoded alone and places worked
// out from kvrt.h, and the counts of what saturated.
#include <doctest/doctest.h>

#include <string>

#include "format/encode.hpp"
#include "format/rotation.hpp"
#include "paged_fixture.hpp"

using namespace kvrt;
using namespace paged_test;

namespace {

struct pair_of_formats {
    uint32_t keys, values;
};

/// Each format as keys and as values, and some together.
std::vector<pair_of_formats> all_pairs() {
    std::vector<pair_of_formats> pairs = {
        {KV_FORMAT_Q8_0, KV_FORMAT_Q4_0},         {KV_FORMAT_Q4_1, KV_FORMAT_Q4_1},
        {KV_FORMAT_FP8_E4M3, KV_FORMAT_FP8_E5M2}, {KV_FORMAT_NVFP4, KV_FORMAT_MXFP4},
        {KV_FORMAT_INT8_TOKEN, KV_FORMAT_F32},    {KV_FORMAT_BF16, KV_FORMAT_INT4_TOKEN},
        {KV_FORMAT_F32, KV_FORMAT_FP8_TOKEN},
    };
    for (const format_test::facts& format : format_test::record_facts()) {
        pairs.push_back({format.id, KV_FORMAT_F16});
        pairs.push_back({KV_FORMAT_F16, format.id});
    }
    for (const format_test::facts& format : format_test::key_facts) {
        pairs.push_back({format.id, KV_FORMAT_F16});
    }
    for (const format_test::facts& format : format_test::value_facts) {
        pairs.push_back({KV_FORMAT_BF16, format.id});
    }
    return pairs;
}

struct write_case {
    tile_order order;
    uint32_t block_tokens, key_dim, value_dim;
    pair_of_formats formats;
    element input;
    bool strided;
    bool rotate_keys, rotate_values;
};

constexpr uint32_t heads = 3;

struct counts {
    std::vector<uint64_t> of[2] = {std::vector<uint64_t>(heads), std::vector<uint64_t>(heads)};
};

/// One row as words of the arena; what saturated is added to the count.
std::vector<std::byte> stored_row(const paged_cache& cache, bool value, uint32_t head,
                                  std::vector<float> row, counts& saturated) {
    const format_test::facts& facts = cache.facts(value);
    const uint32_t dim = static_cast<uint32_t>(row.size());
    std::vector<std::byte> bytes(facts.padded_bytes(dim));
    if (facts.plain()) {
        const uint32_t size = cache.word_bytes(value);
        for (uint32_t i = 0; i < dim; ++i) {
            put_number(bytes.data() + i * size, cache.operand(value).type, double{row[i]});
        }
        return bytes;
    }
    if (cache.operand(value).rotated) rotate_row(row.data(), dim);
    row_constants constants;
    constants.scale = static_cast<float>(cache.scale(value, head));
    find_format(facts.id, facts.role)->encode(row.data(), dim, constants, bytes.data());
    if (facts.meta == format_test::metadata::none) {
        const double largest = facts.code == format_test::coding::e4m3 ? 448.0 : 57344.0;
        for (const float x : row) {
            saturated.of[value][head] +=
                std::abs(double{x}) > largest * double{constants.scale} ? 1 : 0;
        }
    }
    return cache.foreign(value) ? format_test::foreign_form(facts, bytes.data(), dim) : bytes;
}

/// Items of [first slot, rows], each with blocks of its own.
void check_write(const write_case& what, const std::vector<std::pair<uint32_t, uint32_t>>& plans,
                 executor& threads, std::mt19937& random) {
    uint32_t slots = 0, rows = 0;
    for (const auto& [first_slot, count] : plans) {
        slots +=
            (first_slot + count + what.block_tokens - 1) / what.block_tokens * what.block_tokens;
        rows += count;
    }
    paged_cache cache(what.order, what.block_tokens, heads, what.key_dim, what.value_dim,
                      what.formats.keys, what.formats.values, slots);
    cache.layout.keys.rotated = what.rotate_keys && !cache.facts(false).plain();
    cache.layout.values.rotated = what.rotate_values && !cache.facts(true).plain();
    if (cache.facts(false).static_scale) cache.layout.keys.scales = static_scales;
    if (cache.facts(true).static_scale) cache.layout.values.scales = static_scales;

    packed_tensor keys(what.input, rows + 2, heads, what.key_dim, what.strided);
    packed_tensor values(what.input, rows + 2, heads, what.value_dim, what.strided);
    std::normal_distribution<double> normal;
    std::vector<std::byte> expected = cache.copy();
    counts saturated, counted;
    std::vector<write_item> items;
    uint32_t first_block = 0, next_row = 2;
    for (const auto& [first_slot, count] : plans) {
        write_item item;
        item.blocks = cache.blocks.data() + first_block;
        item.first_slot = first_slot;
        item.first_row = next_row;
        item.rows = count;
        items.push_back(item);
        const std::vector<block_id> table(cache.blocks.begin() + first_block, cache.blocks.end());
        for (uint32_t r = 0; r < count; ++r) {
            for (uint32_t head = 0; head < heads; ++head) {
                for (const bool value : {false, true}) {
                    std::vector<float> row(cache.operand(value).dim);
                    // Now and then a row far out, which saturates.
                    const double size = random() % 16 == 0 ? 20000.0 : 1.0;
                    for (uint32_t i = 0; i < row.size(); ++i) {
                        row[i] = static_cast<float>(
                            (value ? values : keys)
                                .put(next_row + r, head, i, size * normal(random)));
                    }
                    const std::vector<std::byte> bytes =
                        stored_row(cache, value, head, row, saturated);
                    for (uint32_t word = 0; word < cache.words(value); ++word) {
                        std::memcpy(expected.data() +
                                        cache.offset(table, value, first_slot + r, head, word),
                                    bytes.data() + word * cache.word_bytes(value),
                                    cache.word_bytes(value));
                    }
                }
            }
        }
        next_row += count;
        first_block += (first_slot + count + what.block_tokens - 1) / what.block_tokens;
    }
    write_rows(cache.layout, cache.arena, items.data(), static_cast<uint32_t>(items.size()),
               keys.view, values.view, {counted.of[0].data(), counted.of[1].data()}, threads);
    CHECK(std::memcmp(cache.arena, expected.data(), expected.size()) == 0);
    for (const bool value : {false, true}) {
        if (cache.facts(value).meta == format_test::metadata::none) {
            CHECK(counted.of[value] == saturated.of[value]);
        }
        if (cache.facts(value).plain()) CHECK(counted.of[value] == std::vector<uint64_t>(heads));
    }
}

template <class number, std::size_t count>
number pick(uint32_t turn, const number (&choices)[count]) {
    return choices[turn % count];
}

}  // namespace

TEST_CASE("every word of a record lies where kvrt.h says") {
    for (const pair_of_formats& formats : all_pairs()) {
        for (const tile_order order : all_orders) {
            for (const uint32_t block_tokens : {16u, 64u}) {
                const paged_cache cache(order, block_tokens, heads, 72, 128, formats.keys,
                                        formats.values, block_tokens);
                CAPTURE(formats.keys);
                CAPTURE(formats.values);
                CAPTURE(static_cast<uint32_t>(order));
                const std::vector<block_id> first = {0};
                std::vector<unsigned char> taken(cache.layout.block_bytes);
                uint32_t wrong = 0;
                for (const bool value : {false, true}) {
                    const operand_layout& operand = cache.operand(value);
                    REQUIRE(operand.words == cache.words(value));
                    REQUIRE(operand.word_bytes == cache.word_bytes(value));
                    for (uint32_t slot = 0; slot < block_tokens; ++slot) {
                        for (uint32_t head = 0; head < heads; ++head) {
                            for (uint32_t word = 0; word < operand.words; ++word) {
                                // The formula of kv_tables, from the strides it exports.
                                const int64_t place =
                                    operand.offset +
                                    int64_t{operand.word_bytes} *
                                        (slot / 16 * operand.group_stride +
                                         slot % 16 * operand.slot_stride +
                                         head * operand.head_stride + word * operand.word_stride);
                                const std::size_t at = cache.offset(first, value, slot, head, word);
                                wrong += static_cast<std::size_t>(place) != at ||
                                         operand.at(slot, head, word) != place ||
                                         at + operand.word_bytes > cache.layout.block_bytes;
                                for (uint32_t i = 0; i < operand.word_bytes; ++i) {
                                    wrong += taken.at(at + i)++;
                                }
                            }
                        }
                    }
                }
                CHECK(wrong == 0);
            }
        }
    }
}

TEST_CASE("rows of any tensor become records in any layout, and nothing else changes") {
    executor alone;
    on_every_target([&] {
        std::mt19937 random(71);
        uint32_t turn = 0;
        for (const pair_of_formats& formats : all_pairs()) {
            for (const tile_order order : all_orders) {
                for (const uint32_t block_tokens : {16u, 64u}) {
                    ++turn;
                    const write_case what = {order,
                                             block_tokens,
                                             pick(turn, {64u, 72u, 32u, 128u, 80u}),
                                             pick(turn, {72u, 64u, 96u, 32u}),
                                             formats,
                                             pick(turn, all_elements),
                                             turn / 3 % 2 != 0,
                                             turn / 2 % 3 == 0,
                                             turn / 2 % 3 == 1};
                    CAPTURE(formats.keys);
                    CAPTURE(formats.values);
                    CAPTURE(static_cast<uint32_t>(order));
                    CAPTURE(turn);
                    check_write(what, {{0, 16}, {5, 29}, {31, 1}}, alone, random);
                }
            }
        }
    });
}

TEST_CASE("the widest rows of each format") {
    executor alone;
    std::mt19937 random(72);
    for (const format_test::facts& format : format_test::record_facts()) {
        CAPTURE(std::string(format.name));
        for (const tile_order order : all_orders) {
            check_write(
                {order, 16, 256, 256, {format.id, format.id}, element::f32, false, true, false},
                {{0, 17}}, alone, random);
        }
    }
}

TEST_CASE("a large call is cut over threads without changing a byte or a count") {
    host_allocator allocator;
    executor threads;
    REQUIRE(threads.start(allocator, 3, nullptr) == KV_OK);
    std::mt19937 random(73);
    for (const tile_order order : all_orders) {
        check_write({order,
                     16,
                     128,
                     128,
                     {KV_FORMAT_FP8_E4M3, KV_FORMAT_FP8_E4M3},
                     element::f16,
                     false,
                     false,
                     false},
                    {{0, 700}, {9, 1}, {15, 400}, {2, 77}}, threads, random);
        check_write({order,
                     64,
                     128,
                     64,
                     {KV_FORMAT_Q4_0, KV_FORMAT_NVFP4},
                     element::bf16,
                     false,
                     true,
                     true},
                    {{0, 900}, {3, 300}}, threads, random);
    }
}
