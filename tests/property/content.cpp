// Keys, values and queries of the world, and what comes back: attention and stored bytes.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "world.hpp"

namespace property {

namespace {

/// Small integers in [0, 128), exact in every format; a digit sequence that names the element.
float fingerprint(uint64_t tenant, uint32_t serial, uint64_t token_number, uint64_t position,
                  uint32_t lane, uint32_t head, bool value, uint32_t dim) {
    const uint64_t digits[] = {token_number,
                               token_number >> 7,
                               token_number >> 14,
                               position,
                               position >> 7,
                               serial,
                               serial >> 7,
                               tenant,
                               uint64_t{lane} * 2 + value,
                               head};
    constexpr uint32_t count = sizeof digits / sizeof digits[0];
    const uint64_t digit = digits[dim % count] + uint64_t{dim / count} * 31;
    return static_cast<float>(digit % 128) / 64.0f;
}

float load(const char* address, uint32_t format) {
    if (format == KV_FORMAT_F32) {
        float number;
        std::memcpy(&number, address, sizeof number);
        return number;
    }
    uint16_t bits;
    std::memcpy(&bits, address, sizeof bits);
    const int mantissa_bits = format == KV_FORMAT_F16 ? 10 : 7;
    const int exponent_mask = format == KV_FORMAT_F16 ? 0x1f : 0xff;
    const int bias = format == KV_FORMAT_F16 ? 15 : 127;
    const int exponent = (bits >> mantissa_bits) & exponent_mask;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == exponent_mask) return mantissa != 0 ? NAN : static_cast<float>(sign * INFINITY);
    const int whole = exponent == 0 ? mantissa : mantissa | (1 << mantissa_bits);
    const int power = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
    return static_cast<float>(sign * std::ldexp(whole, power));
}

/// Bits of a number that the 16-bit format holds exactly and that is normal there, or zero.
uint16_t bits_of(float number, uint32_t dtype) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (dtype == KV_DTYPE_BF16 || number == 0.0f) return static_cast<uint16_t>(bits >> 16);
    const uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

/// A caller's buffer in one of the element types; the numbers must be exact in it.
struct operand {
    operand(std::vector<float>& source, uint32_t type) : dtype(type), numbers(source) {
        if (dtype == KV_DTYPE_F32) return;
        for (const float number : source) halves.push_back(bits_of(number, dtype));
    }
    void* at(std::size_t index) {
        if (dtype == KV_DTYPE_F32) return numbers.data() + index;
        return halves.data() + index;
    }

    uint32_t dtype;
    std::vector<float>& numbers;
    std::vector<uint16_t> halves;
};

}  // namespace

void world::write_token(world_step&, world_item& item, uint32_t row, float* numbers) {
    const oracle_sequence& owner = *item.owner;
    const uint64_t position = owner.next_position + row;
    const uint64_t number = next_token_++;
    auto stored = std::make_shared<token_values>(model_.values_per_token);
    uint64_t bits = 0;
    for (uint32_t lane = 0; lane < model_.lanes.size(); ++lane) {
        const oracle_lane_shape& shape = model_.lanes[lane];
        const layer_spec& layer = model_.spec.layers[shape.layer];
        const uint32_t width = shape.key_dim + shape.value_dim;
        for (uint32_t i = 0; i < shape.kv_heads * width; ++i) {
            const uint32_t head = i / width;
            const bool value = i % width >= shape.key_dim;
            const uint32_t dim = value ? i % width - shape.key_dim : i % width;
            float& given = numbers[shape.values_offset + i];
            float& kept = (*stored)[shape.values_offset + i];
            if (filling_ == content::fingerprints) {
                given =
                    fingerprint(tenant_, owner.serial, number, position, lane, head, value, dim);
                kept = given;
                continue;
            }
            if (i % 4 == 0) bits = random_();
            given = static_cast<float>(static_cast<int>(bits & 0xffff) - 0x8000) / 16384.0f;
            bits >>= 16;
            kept = round_to_format(given, value ? layer.value_format : layer.key_format);
        }
    }
    item.tokens.push_back({static_cast<uint32_t>(position), std::move(stored)});
}

/// For mutation::overwritten_tail: what a forgotten copy-on-write would do.
void world::overwrite_sharers(const world_item& item) {
    for (std::size_t lane = 0; lane < item.undo.size(); ++lane) {
        const block_reference& shared = item.undo[lane].replaced;
        if (shared == nullptr) continue;
        const std::size_t index = item.undo[lane].blocks_before - 1;
        const uint32_t first = item.owner->lanes[lane].slots();
        const std::size_t end = (index + 1) * model_.spec.block_tokens;
        for (const std::unique_ptr<oracle_sequence>& other : sequences_) {
            oracle_lane& state = other->lanes[lane];
            if (state.table.size() <= index || state.table[index] != shared) continue;
            for (std::size_t slot = first; slot < std::min<std::size_t>(end, state.slots());
                 ++slot) {
                if (slot - first >= item.tokens.size()) break;
                for (std::vector<token>& head : state.heads) {
                    head[slot].values = item.tokens[slot - first].values;
                }
            }
        }
    }
}

void world::forward(int place, const attention_sample* sample) {
    note("forward {}", place);
    world_step& step = steps_[place];
    const uint32_t rows = step.rows();
    const uint32_t width = model_.values_per_token;
    std::vector<float> numbers(std::size_t{rows} * width);
    uint32_t row = 0;
    for (world_item& item : step.items) {
        item.tokens.clear();
        for (uint32_t r = 0; r < item.rows; ++r, ++row) {
            write_token(step, item, r, numbers.data() + std::size_t{row} * width);
        }
        item.owner->written_rows = item.rows;
    }
    // Keys and values lie packed in one buffer, as an engine's projections often do.
    const bool exact = filling_ == content::fingerprints;
    const uint32_t types = exact ? 3 : 1;
    operand packed(numbers, KV_DTYPE_F32 + static_cast<uint32_t>(below(types)));
    for (const oracle_lane_shape& shape : model_.lanes) {
        if (shape.first_head != 0) continue;  // numbers of a layer's lanes lie side by side
        kv_tensor keys = KV_INIT(kv_tensor);
        keys.data = packed.at(shape.values_offset);
        keys.dtype = packed.dtype;
        keys.rows = rows;
        keys.heads = model_.spec.layers[shape.layer].kv_heads;
        keys.dim = shape.key_dim;
        keys.row_stride = width;
        keys.head_stride = shape.key_dim + shape.value_dim;
        keys.dim_stride = 1;
        kv_tensor values = keys;
        values.data = packed.at(shape.values_offset + shape.key_dim);
        values.dim = shape.value_dim;
        require_ok(kv_write(step.handle, shape.layer, &keys, &values), "kv_write");
    }
    step.written = true;
    if (model_.defect == mutation::overwritten_tail) {
        for (const world_item& item : step.items) overwrite_sharers(item);
    }
    if (sample == nullptr) return;
    for (uint32_t layer = 0; layer < model_.spec.layers.size(); ++layer) {
        attend_layer(step, layer, *sample);
        if (!sample->bytes) continue;
        const uint32_t heads = model_.spec.layers[layer].kv_heads;
        const uint32_t first = lane_of(model_.spec, layer, 0);
        for (uint32_t lane = first; lane <= lane_of(model_.spec, layer, heads - 1); ++lane) {
            compare_bytes(step, layer, lane);
        }
    }
}

void world::compare_row(const world_step& step, const world_item& item, uint32_t row,
                        uint32_t layer, uint32_t head, const float* query, const double* out,
                        double log_sum, double tolerance) {
    const layer_spec& description = model_.spec.layers[layer];
    const uint32_t kv_head = head / description.group();
    const uint32_t lane = lane_of(model_.spec, layer, kv_head);
    const oracle_lane_shape& shape = model_.lanes[lane];
    std::vector<const token*> visible;
    for (const token& t : item.owner->lanes[lane].heads[kv_head - shape.first_head])
        visible.push_back(&t);
    for (const token& t : item.tokens) visible.push_back(&t);
    attention_query wanted;
    wanted.lane = &shape;
    wanted.layer = &description;
    wanted.query_head = head;
    wanted.position = item.owner->next_position + row;
    wanted.query = query;
    std::vector<double> expected(shape.value_dim);
    const double expected_log = attend(model_, wanted, visible, expected.data());
    double scale = 1.0;
    for (const double e : expected) scale = std::max(scale, std::abs(e));
    for (uint32_t d = 0; d < shape.value_dim; ++d) {
        require(std::abs(out[d] - expected[d]) <= tolerance * scale,
                "step {} sequence {} position {} layer {} head {} dim {}: attention gives {} "
                "instead of {}",
                step.number, item.owner->serial, wanted.position, layer, head, d, out[d],
                expected[d]);
    }
    require(std::abs(log_sum - expected_log) <= 2e-5 * std::max(1.0, std::abs(expected_log)),
            "step {} sequence {} position {} layer {} head {}: log-sum-exp {} instead of {}",
            step.number, item.owner->serial, wanted.position, layer, head, log_sum, expected_log);
    ++attention_rows_;
}

void world::attend_layer(world_step& step, uint32_t layer, const attention_sample& sample) {
    const layer_spec& description = model_.spec.layers[layer];
    const uint32_t rows = step.rows();
    std::vector<float> queries(std::size_t{rows} * description.query_heads * description.key_dim);
    const uint32_t dtype = KV_DTYPE_F32 + static_cast<uint32_t>(below(3));
    uint64_t bits = 0;
    for (std::size_t i = 0; i < queries.size(); ++i) {
        if (i % 4 == 0) bits = random_();
        queries[i] = static_cast<float>(static_cast<int>(bits & 0xffff) - 0x8000) / 16384.0f;
        queries[i] = round_to_format(queries[i], dtype);
        bits >>= 16;
    }
    operand given(queries, dtype);
    kv_tensor in = KV_INIT(kv_tensor);
    in.data = given.at(0);
    in.dtype = given.dtype;
    in.rows = rows;
    in.heads = description.query_heads;
    in.dim = description.key_dim;
    const uint32_t out_bytes = sample.out_type == KV_DTYPE_F32 ? 4 : 2;
    const std::size_t out_count =
        std::size_t{rows} * description.query_heads * description.value_dim;
    std::vector<char> result(out_count * out_bytes, static_cast<char>(0xff));
    kv_tensor out = in;  // the same rows
    out.data = result.data();
    out.dtype = sample.out_type;
    out.dim = description.value_dim;
    std::vector<float> log_sums(std::size_t{rows} * description.query_heads, NAN);
    kv_attend_options options = KV_INIT(kv_attend_options);
    options.log_sum_exp = log_sums.data();
    require_ok(kv_attend(step.handle, layer, &in, &out, &options), "kv_attend");

    const double tolerance = sample.out_type == KV_DTYPE_F32   ? 1e-5
                             : sample.out_type == KV_DTYPE_F16 ? 6e-4
                                                               : 5e-3;
    uint32_t first_row = 0;
    for (const world_item& item : step.items) {
        observe(item, layer,
                queries.data() +
                    std::size_t{first_row} * description.query_heads * description.key_dim);
        const uint32_t picked = sample.rows == 0 ? item.rows : std::min(sample.rows, item.rows);
        for (uint32_t i = 0; i < picked; ++i) {
            const uint32_t row = sample.rows == 0 ? i : static_cast<uint32_t>(below(item.rows));
            const uint32_t heads = sample.heads == 0
                                       ? description.query_heads
                                       : std::min(sample.heads, description.query_heads);
            for (uint32_t h = 0; h < heads; ++h) {
                const uint32_t head =
                    sample.heads == 0 ? h : static_cast<uint32_t>(below(description.query_heads));
                const std::size_t at =
                    std::size_t{first_row + row} * description.query_heads + head;
                std::vector<double> found(description.value_dim);
                for (uint32_t d = 0; d < description.value_dim; ++d) {
                    found[d] =
                        double{load(result.data() + (at * description.value_dim + d) * out_bytes,
                                    sample.out_type)};
                }
                compare_row(step, item, row, layer, head, queries.data() + at * description.key_dim,
                            found.data(), double{log_sums[at]}, tolerance);
            }
        }
        first_row += item.rows;
    }
}

/// Reads the stored numbers of a lane through exported tables: every slot of one item, some of the
/// others.
void world::compare_bytes(world_step& step, uint32_t layer, uint32_t lane) {
    const oracle_lane_shape& shape = model_.lanes[lane];
    const std::size_t items = step.items.size();
    const uint32_t width = model_.blocks_for(model_.spec.max_tokens);
    std::vector<int32_t> table(items * width), lengths(items), starts(items + 1);
    std::vector<int32_t> slot_positions(items * model_.spec.max_tokens * shape.kv_heads);
    kv_tables tables = KV_INIT(kv_tables);
    tables.block_table = table.data();
    tables.block_table_stride = width;
    tables.block_table_capacity = table.size();
    tables.kv_len = lengths.data();
    tables.slot_indptr = starts.data();
    tables.item_capacity = items;
    tables.slot_positions = slot_positions.data();
    tables.slot_positions_capacity = slot_positions.size();
    tables.kv_head = shape.first_head;
    require_ok(kv_step_export(step.handle, layer, &tables), "kv_step_export");
    step.exported = true;
    const auto base = static_cast<const char*>(tables.base);
    const std::size_t whole = below(items);
    for (std::size_t i = 0; i < items; ++i) {
        const world_item& item = step.items[i];
        const oracle_lane& state = item.owner->lanes[lane];
        const uint32_t slots = state.slots() + item.rows;
        require(lengths[i] == static_cast<int32_t>(slots), "layer {} item {}: kv_len {} not {}",
                layer, i, lengths[i], slots);
        for (uint32_t head = 0; head < shape.kv_heads; ++head) {
            for (uint32_t slot = 0; slot < slots; ++slot) {
                const token& expected = slot < state.slots() ? state.heads[head][slot]
                                                             : item.tokens[slot - state.slots()];
                const int32_t position =
                    slot_positions[head * static_cast<std::size_t>(starts[items]) +
                                   static_cast<std::size_t>(starts[i]) + slot];
                require(position == static_cast<int32_t>(expected.position),
                        "layer {} item {} head {} slot {}: exported position {} instead of {}",
                        layer, i, head, slot, position, expected.position);
                if (i != whole && below(8) != 0) continue;
                const uint32_t in_block = slot % tables.block_tokens;
                const char* block = base + int64_t{table[i * width + slot / tables.block_tokens]} *
                                               tables.block_stride;
                const int64_t group = in_block / tables.slot_group,
                              in_group = in_block % tables.slot_group;
                for (uint32_t d = 0; d < shape.key_dim + shape.value_dim; ++d) {
                    const bool value = d >= shape.key_dim;
                    const int64_t dim = value ? d - shape.key_dim : d;
                    const uint32_t format = value ? tables.value_format : tables.key_format;
                    const int64_t at =
                        value
                            ? group * tables.value_stride_group +
                                  in_group * tables.value_stride_slot +
                                  head * tables.value_stride_head + dim * tables.value_stride_dim
                            : group * tables.key_stride_group + in_group * tables.key_stride_slot +
                                  head * tables.key_stride_head + dim * tables.key_stride_dim;
                    const float found =
                        load(block + (value ? tables.value_offset : tables.key_offset) +
                                 at * format_bytes(format),
                             format);
                    const float wanted = shape.key(expected, head)[d];
                    require(
                        found == wanted,
                        "sequence {} layer {} head {} slot {} (position {}) {} {}: {} is stored "
                        "instead of {}",
                        item.owner->serial, layer, head, slot, expected.position,
                        value ? "value" : "key", dim, found, wanted);
                }
                bytes_compared_ += shape.key_dim * format_bytes(tables.key_format) +
                                   shape.value_dim * format_bytes(tables.value_format);
            }
        }
    }
}

}  // namespace property
