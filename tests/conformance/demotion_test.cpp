// What a foreign kernel sees of a layer that demotes: rows read through kv_tables alone, decoded
// here by what kvrt.h says of the formats, against the rows that were written, and attention over
// them in double.
#include <map>

#include "tables.hpp"

using namespace conformance;

namespace {

constexpr uint32_t dim = 64;
constexpr uint32_t tokens = 100;

layer_shape demoting(uint32_t written, uint32_t keys, uint32_t values, uint32_t flags = 0) {
    layer_shape layer;
    layer.key_dim = layer.value_dim = dim;
    layer.key_format = layer.value_format = written;
    layer.demoted_key_format = keys;
    layer.demoted_value_format = values;
    layer.demote_after = 20;
    layer.demoted_storage_flags = flags;
    return layer;
}

std::vector<layer_shape> all_layers() {
    std::vector<layer_shape> layers = {
        demoting(KV_FORMAT_F16, KV_FORMAT_INT8_TOKEN, 0),
        demoting(KV_FORMAT_F16, KV_FORMAT_Q8_0, KV_FORMAT_F16),
        demoting(KV_FORMAT_F32, KV_FORMAT_F16, KV_FORMAT_BF16),
        demoting(KV_FORMAT_BF16, KV_FORMAT_INT4_TOKEN, 0, KV_STORAGE_ROTATE),
        demoting(KV_FORMAT_F16, KV_FORMAT_FP8_E4M3, 0, KV_STORAGE_SCALE_ONE),
        demoting(KV_FORMAT_F16, KV_FORMAT_INT8_TOKEN, 0),
    };
    layers.back().lane_per_head = true;
    return layers;
}

/// A float of 1 + exponent_bits + mantissa_bits, finite.
double small_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int fraction = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
    const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa_bits)
                                           : std::ldexp(fraction + (1 << mantissa_bits),
                                                        exponent - bias - mantissa_bits);
    return (bits >> (exponent_bits + mantissa_bits)) != 0 ? -magnitude : magnitude;
}

template <class number>
number at(const std::string& bytes, std::size_t offset) {
    number found;
    REQUIRE(offset + sizeof found <= bytes.size());
    std::memcpy(&found, bytes.data() + offset, sizeof found);
    return found;
}

double f16_at(const std::string& bytes, std::size_t offset) {
    return small_float(at<uint16_t>(bytes, offset), 5, 10);
}

/// A decoded row, and how far each channel may be from what was coded: half a step.
struct decoded {
    std::vector<double> numbers = std::vector<double>(dim);
    std::vector<double> reach = std::vector<double>(dim);
};

void decode_plain(uint32_t format, const std::string& bytes, decoded& row) {
    for (uint32_t d = 0; d < dim; ++d) {
        double& x = row.numbers[d];
        if (format == KV_FORMAT_F32) x = double{at<float>(bytes, 4 * d)};
        if (format == KV_FORMAT_F16) x = f16_at(bytes, 2 * d);
        if (format == KV_FORMAT_BF16) x = small_float(at<uint16_t>(bytes, 2 * d), 8, 7);
        const double unit = format == KV_FORMAT_BF16 ? 0x1p-8 : 0x1p-11;
        row.reach[d] = unit * std::abs(x) + 0x1p-25;
    }
}

decoded decode(uint32_t format, uint32_t layout, const float* scale, const std::string& bytes) {
    decoded row;
    if (format <= KV_FORMAT_BF16) {
        decode_plain(format, bytes, row);
        return row;
    }
    for (uint32_t d = 0; d < dim; ++d) {
        double step = 0.0, least = 0.0, code = 0.0;
        if (format == KV_FORMAT_INT8_TOKEN) {
            step = double{at<float>(bytes, dim)};
            code = at<int8_t>(bytes, d);
        } else if (format == KV_FORMAT_Q8_0) {
            // llama.cpp's blocks, or all codes first and the groups' scales behind them.
            const bool blocks = layout != KV_LAYOUT_NATIVE;
            step = f16_at(bytes, blocks ? d / 32 * 34 : dim + d / 32 * 2);
            code = at<int8_t>(bytes, blocks ? d / 32 * 34 + 2 + d % 32 : d);
        } else if (format == KV_FORMAT_INT4_TOKEN) {
            step = f16_at(bytes, dim / 2);
            least = f16_at(bytes, dim / 2 + 2);
            code = at<uint8_t>(bytes, d % (dim / 2)) >> (d < dim / 2 ? 0 : 4) & 15;
        } else {
            REQUIRE(format == KV_FORMAT_FP8_E4M3);
            REQUIRE(scale != nullptr);
            code = small_float(at<uint8_t>(bytes, d), 4, 3);
            row.numbers[d] = code * double{*scale};
            row.reach[d] = std::max(std::abs(code) * 0x1p-4, 0x1p-10) * double{*scale};
            continue;
        }
        row.numbers[d] = step * code + least;
        // Steps in f16, and codes at the ends of a range that f16 cut, are a little off.
        const double rounded = format == KV_FORMAT_INT8_TOKEN ? 0.5001 : 0.52;
        row.reach[d] = rounded * step + std::abs(row.numbers[d]) * 0x1p-10;
    }
    return row;
}

/// Hadamard's matrix of 64, orthonormal: its own inverse.
void rotate(std::vector<double>& row) {
    std::vector<double> turned(dim);
    for (uint32_t i = 0; i < dim; ++i) {
        for (uint32_t j = 0; j < dim; ++j) {
            turned[i] += (__builtin_popcount(i & j) % 2 == 0 ? 1 : -1) * row[j] / 8.0;
        }
    }
    row = turned;
}

/// One operand, before its blocks are sealed or afterwards.
struct operand_view {
    uint32_t format, words, word_bytes;
    int64_t offset, group, slot, head, word;
    const float* scales;
};

operand_view view_of(const kv_tables& t, bool value, bool sealed) {
    if (sealed && value) {
        return {t.sealed_value_format,      t.sealed_value_words,        t.sealed_value_word_bytes,
                t.sealed_value_offset,      t.sealed_value_stride_group, t.sealed_value_stride_slot,
                t.sealed_value_stride_head, t.sealed_value_stride_dim,   t.sealed_value_scales};
    }
    if (sealed) {
        return {t.sealed_key_format,      t.sealed_key_words,        t.sealed_key_word_bytes,
                t.sealed_key_offset,      t.sealed_key_stride_group, t.sealed_key_stride_slot,
                t.sealed_key_stride_head, t.sealed_key_stride_dim,   t.sealed_key_scales};
    }
    if (value) {
        return {t.value_format,      t.value_words,        t.value_word_bytes,
                t.value_offset,      t.value_stride_group, t.value_stride_slot,
                t.value_stride_head, t.value_stride_dim,   t.value_scales};
    }
    return {t.key_format,      t.key_words,        t.key_word_bytes,
            t.key_offset,      t.key_stride_group, t.key_stride_slot,
            t.key_stride_head, t.key_stride_dim,   t.key_scales};
}

struct stored_row {
    std::string bytes;
    decoded row;
    bool sealed;
};

/// Row `slot` of item 0, in whichever of the two forms its block has.
stored_row read(const exported& e, uint32_t slot, uint32_t head, bool value) {
    const kv_tables& t = e.tables;
    const uint32_t index = slot / t.block_tokens, in_block = slot % t.block_tokens;
    stored_row found;
    found.sealed = index < static_cast<uint32_t>(e.sealed_blocks[0]);
    const operand_view view = view_of(t, value, found.sealed);
    const char* block = static_cast<const char*>(t.base) + e.block_table[index] * t.block_stride;
    for (uint32_t w = 0; w < view.words; ++w) {
        const int64_t element = in_block / t.slot_group * view.group +
                                in_block % t.slot_group * view.slot + head * view.head +
                                w * view.word;
        found.bytes.append(block + view.offset + element * view.word_bytes, view.word_bytes);
    }
    const float* scale = view.scales == nullptr ? nullptr : view.scales + head;
    found.row = decode(view.format, t.layout, scale, found.bytes);
    return found;
}

/// All rows of a layer, by KV head, operand and position.
using rows_of_layer = std::map<std::tuple<uint32_t, bool, int32_t>, stored_row>;

rows_of_layer read_layer(kv_step* step, const layer_shape& shape, uint32_t layer) {
    rows_of_layer found;
    for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        const exported e(step, layer, shape.lane_per_head ? kv_head : 0);
        const uint32_t head = shape.lane_per_head ? 0 : kv_head;
        const uint32_t slots = static_cast<uint32_t>(e.kv_len[0]);
        for (uint32_t slot = 0; slot < slots; ++slot) {
            const int32_t position = e.slot_positions[uint64_t{head} * slots + slot];
            for (const bool value : {false, true}) {
                found[{kv_head, value, position}] = read(e, slot, head, value);
            }
        }
    }
    return found;
}

bool rotated(const layer_shape& shape) {
    return (shape.demoted_storage_flags & KV_STORAGE_ROTATE) != 0;
}

/// The first row's attention over `rows`, against kv_attend's.
double attention_error(const layer_shape& s, const rows_of_layer& rows,
                       const std::vector<float>& queries, const std::vector<float>& found) {
    double largest = 0.0;
    for (uint32_t head = 0; head < s.query_heads; ++head) {
        const uint32_t kv_head = head / (s.query_heads / s.kv_heads);
        std::vector<double> query(queries.begin() + head * dim, queries.begin() + (head + 1) * dim);
        if (rotated(s)) rotate(query);
        double denominator = 0.0;
        std::vector<double> out(dim);
        for (const auto& [key, stored] : rows) {
            if (std::get<0>(key) != kv_head || std::get<1>(key)) continue;
            double logit = 0.0;
            for (uint32_t d = 0; d < dim; ++d) logit += query[d] * stored.row.numbers[d];
            const double weight = std::exp(logit / 8.0);
            denominator += weight;
            const stored_row& value = rows.at({kv_head, true, std::get<2>(key)});
            for (uint32_t d = 0; d < dim; ++d) out[d] += weight * value.row.numbers[d];
        }
        if (rotated(s)) rotate(out);
        for (uint32_t d = 0; d < dim; ++d) {
            largest =
                std::max(largest, std::abs(out[d] / denominator - double{found[head * dim + d]}));
        }
    }
    return largest;
}

/// Numbers as they were written, up to the format of rows that are not demoted.
void check_written(const layer_shape& s, uint32_t layer, const rows_of_layer& rows) {
    for (const auto& [key, stored] : rows) {
        const auto [head, value, position] = key;
        std::vector<double> row = stored.row.numbers;
        if (rotated(s)) rotate(row);
        for (uint32_t d = 0; d < dim; ++d) {
            const double wanted =
                double{drawn(1, static_cast<uint64_t>(position), layer, head, d, value ? 1 : 0)};
            REQUIRE(std::abs(row[d] - wanted) < (rotated(s) ? 0.03 : 0.002));
        }
    }
}

/// Each row as it was, or coded once from what it was: which, the tables say. Returns how many are
/// coded now.
uint64_t check_demoted(const rows_of_layer& before, const rows_of_layer& rows) {
    uint64_t coded = 0;
    for (const auto& [key, stored] : rows) {
        const stored_row& was = before.at(key);
        if (stored.sealed == was.sealed) {
            REQUIRE(stored.bytes == was.bytes);
            continue;
        }
        REQUIRE(stored.sealed);
        ++coded;
        for (uint32_t d = 0; d < dim; ++d) {
            REQUIRE(std::abs(stored.row.numbers[d] - was.row.numbers[d]) <= stored.row.reach[d]);
        }
    }
    return coded;
}

}  // namespace

TEST_CASE("demoted rows and others read through exported tables are those of the formats") {
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        for (const uint32_t block_tokens : {16u, 32u}) {
            CAPTURE(layout);
            CAPTURE(block_tokens);
            pool_shape shape;
            shape.layers = all_layers();
            shape.layout = layout;
            shape.block_tokens = block_tokens;
            engine host(shape);
            const kv_seq sequence = host.create();
            std::vector<rows_of_layer> before;
            kv_step* step = host.begin({{sequence, 1, tokens}});
            for (uint32_t layer = 0; layer < shape.layers.size(); ++layer) {
                CAPTURE(layer);
                host.write(step, layer);
                before.push_back(read_layer(step, shape.layers[layer], layer));
                CHECK(before.back().size() == uint64_t{2} * 2 * tokens);
                check_written(shape.layers[layer], layer, before.back());
            }
            kv_step_report report = KV_INIT(kv_step_report);
            require_ok(kv_step_end(step, &report));
            // 80 tokens are old enough; the last layer has blocks for each of two heads.
            const uint64_t demoted = 80 / block_tokens;
            CHECK(report.demoted_blocks == demoted * (shape.layers.size() + 1));

            // As they are; 60 of them with the newest block; and with so few new ones that the last
            // demoted block takes them along, and is opened again for the next token.
            for (const auto& [budget, recent] : {std::pair{tokens, 0u}, {60u, 32u}, {30u, 1u}}) {
                CAPTURE(budget);
                kv_policy policy = policy_of(KV_SCORER_RANDOM, budget);
                policy.recent = recent;
                kv_compress_options options = KV_INIT(kv_compress_options);
                options.policy = &policy;
                require_ok(kv_compress(host.pool(), sequence, &options, nullptr));
                step = host.begin({{sequence, 1, 1}});
                for (uint32_t layer = 0; layer < shape.layers.size(); ++layer) {
                    CAPTURE(layer);
                    host.write(step, layer);
                    rows_of_layer rows = read_layer(step, shape.layers[layer], layer);
                    CHECK(rows.size() == uint64_t{2} * 2 * (budget + 1));
                    CHECK(attention_error(shape.layers[layer], rows, host.queries(layer),
                                          host.attend(step, layer)) < 2e-5);
                    for (uint32_t i = 0; i < 4; ++i) rows.erase({i / 2, i % 2 == 1, tokens});
                    if (recent != 1) {
                        const uint64_t coded = check_demoted(before[layer], rows);
                        if (budget == tokens) CHECK(coded == 2 * 2 * demoted * block_tokens);
                    }
                    before[layer] = rows;
                }
                require_ok(kv_step_cancel(step));
            }
        }
    }
}

TEST_CASE("tables say what static scales belong to: rows that are demoted") {
    pool_shape shape;
    shape.layers = all_layers();
    engine host(shape);
    kv_step* step = host.begin({{host.create(), 1, 1}});
    for (uint32_t layer = 0; layer < shape.layers.size(); ++layer) {
        CAPTURE(layer);
        const exported e(step, layer);
        CHECK(e.tables.key_scales == nullptr);
        CHECK(e.tables.value_scales == nullptr);
        const bool scaled = shape.layers[layer].demoted_key_format == KV_FORMAT_FP8_E4M3;
        REQUIRE((e.tables.sealed_key_scales != nullptr) == scaled);
        REQUIRE((e.tables.sealed_value_scales != nullptr) == scaled);
        if (!scaled) continue;
        CHECK(e.tables.sealed_key_scales[1] == 1.0f);
        CHECK(e.tables.sealed_value_scales[1] == 1.0f);
    }
    require_ok(kv_step_cancel(step));
}

TEST_CASE("tiles have no words: tables say 0 of them, and strides of what lies beside them") {
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        CAPTURE(layout);
        pool_shape shape;
        shape.layers.resize(1);
        shape.layers[0].key_dim = shape.layers[0].value_dim = dim;
        shape.layers[0].key_format = KV_FORMAT_KIVI4;
        shape.layers[0].value_format = KV_FORMAT_INT8_TOKEN;
        shape.layout = layout;
        shape.block_tokens = 32;
        engine host(shape);
        kv_step* step = host.begin({{host.create(), 1, 1}});
        const kv_tables t = exported(step, 0).tables;
        CHECK(t.sealed_key_words == 0);
        CHECK(t.sealed_key_word_bytes == 0);
        CHECK(t.sealed_key_stride_group == 0);
        CHECK(t.sealed_key_stride_slot == 0);
        CHECK(t.sealed_key_stride_head == 0);
        CHECK(t.sealed_key_stride_dim == 0);
        CHECK(t.sealed_value_words == (dim + 4) / 4);
        CHECK(t.sealed_value_word_bytes == 4);
        CHECK(t.sealed_value_stride_dim == 1);
        CHECK(t.sealed_value_stride_slot == t.value_stride_slot);
        require_ok(kv_step_cancel(step));
    }
}
