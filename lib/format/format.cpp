#include "format/format.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "format/formats.hpp"

namespace kvrt {

namespace {

constexpr format_description f32_format = {
    .id = KV_FORMAT_F32, .name = "f32", .plain_type = element::f32, .code_bits = 32};
constexpr format_description f16_format = {
    .id = KV_FORMAT_F16, .name = "f16", .plain_type = element::f16, .code_bits = 16};
constexpr format_description bf16_format = {
    .id = KV_FORMAT_BF16, .name = "bf16", .plain_type = element::bf16, .code_bits = 16};

struct role_formats {
    const format_description* keys;  ///< null where the format is none of keys
    const format_description* values;
};

constexpr role_formats both(const format_description& format) { return {&format, &format}; }

const role_formats formats[] = {
    both(f32_format),
    both(f16_format),
    both(bf16_format),
    both(fp8_e4m3_format),
    both(fp8_e5m2_format),
    both(fp8_token_format),
    both(int8_token_format),
    both(int4_token_format),
    both(q8_0_format),
    both(q4_0_format),
    both(q4_1_format),
    both(nvfp4_format),
    both(mxfp4_format),
    {&kivi4_key_format, &kivi4_value_format},
    {&kivi2_key_format, &kivi2_value_format},
    {&kvarn4_key_format, &kvarn4_value_format},
    {&kvarn2_key_format, &kvarn2_value_format},
    {&turbo4_key_format, &turbo4_value_format},
    {&turbo3_key_format, &turbo3_value_format},
    {&affine4_format, nullptr},
};

}  // namespace

const format_description* find_format(uint32_t id, operand_role role) {
    if (id == KV_FORMAT_DEFAULT) return &f16_format;
    for (const role_formats& known : formats) {
        const format_description* format = role == operand_role::keys ? known.keys : known.values;
        if (format != nullptr && format->id == id) return format;
    }
    return nullptr;
}

uint32_t record_bytes(const format_description& format, uint32_t dim) {
    if (format.kind == format_class::plain) return dim * format.code_bits / 8;
    return round_up(inline_bytes(format, dim), record_word);
}

uint32_t inline_bytes(const format_description& format, uint32_t dim) {
    return format.code_bytes(dim) + format.groups(dim) * format.group_bytes;
}

namespace {

/// Calls move(record's offset, row's offset, bytes) for each part of each group.
template <class callable>
void walk_inline(const format_description& format, uint32_t dim, const callable& move) {
    uint32_t codes = 0, meta = format.code_bytes(dim), row = 0;
    for (uint32_t at = 0; at < dim; at += format.group_of(dim)) {
        const uint32_t count = std::min(format.group_of(dim), dim - at);
        move(meta, row, format.group_bytes);
        move(codes, row + format.group_bytes, format.code_bytes(count));
        meta += format.group_bytes;
        codes += format.code_bytes(count);
        row += format.group_bytes + format.code_bytes(count);
    }
}

}  // namespace

void to_inline(const format_description& format, uint32_t dim, const std::byte* record,
               std::byte* row) {
    walk_inline(format, dim, [&](uint32_t from, uint32_t to, uint32_t bytes) {
        std::memcpy(row + to, record + from, bytes);
    });
}

void from_inline(const format_description& format, uint32_t dim, const std::byte* row,
                 std::byte* record) {
    walk_inline(format, dim, [&](uint32_t to, uint32_t from, uint32_t bytes) {
        std::memcpy(record + to, row + from, bytes);
    });
}

}  // namespace kvrt
