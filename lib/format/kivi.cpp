// KIVI (arXiv 2402.02750) with codes of 4 and 2 bits, x = step * code + least in groups of 32: of
// tokens for each channel of keys, whose outliers keep to channels; of channels for each token of
// values.
//
// A tile of keys: codes in columns (tile_codes.hpp); then of each 32 tokens step[dim] and
// least[dim] in f16; then zeros up to a multiple of 64 bytes. A channel with a number that is not
// finite becomes NaN in those 32 tokens.
#include "base/checked.hpp"
#include "format/affine_codes.hpp"
#include "format/formats.hpp"
#include "format/tile_codes.hpp"

namespace kvrt {

namespace {

constexpr uint32_t group = 32;

template <uint32_t bits>
uint32_t bytes_of_keys(uint32_t tokens, uint32_t dim) {
    const uint32_t codes = tokens * code_words(dim, bits) * record_word;
    return round_up(codes + tokens / group * dim * 4, 64u);
}

/// Where the metadata of a group of tokens start.
template <uint32_t bits>
uint32_t metadata_at(uint32_t tokens, uint32_t dim, uint32_t token) {
    return tokens * code_words(dim, bits) * record_word + token / group * dim * 4;
}

template <uint32_t bits>
void seal_keys(const float* rows, uint32_t tokens, uint32_t dim, std::byte* tile) {
    constexpr float last_code = (1u << bits) - 1;
    const uint32_t end = metadata_at<bits>(tokens, dim, tokens);
    std::memset(tile + end, 0, bytes_of_keys<bits>(tokens, dim) - end);
    for (uint32_t first = 0; first < tokens; first += group, rows += group * dim) {
        float least[widest_row], largest[widest_row], inverse[widest_row], flaw[widest_row];
        for (uint32_t i = 0; i < dim; ++i) {
            least[i] = largest[i] = rows[i];
            flaw[i] = 0.0f;  // x * 0 is NaN unless x is finite
        }
        for (uint32_t t = 0; t < group; ++t) {
            const float* row = rows + t * dim;
            for (uint32_t i = 0; i < dim; ++i) {
                const float x = row[i];
                least[i] = x < least[i] ? x : least[i];
                largest[i] = x > largest[i] ? x : largest[i];
                flaw[i] += x * 0.0f;
            }
        }
        std::byte* steps = tile + metadata_at<bits>(tokens, dim, first);
        std::byte* leasts = steps + dim * 2;
        for (uint32_t i = 0; i < dim; ++i) {
            stored_affine made{NAN, NAN};
            if (flaw[i] == 0.0f) made = affine_over(least[i], largest[i], last_code);
            store_f16(steps + i * 2, made.step);
            store_f16(leasts + i * 2, made.least);
            inverse[i] = made.inverse();
            least[i] = made.least;
        }
        for (uint32_t t = 0; t < group; ++t) {
            const float* row = rows + t * dim;
            uint8_t codes[widest_row];
            for (uint32_t i = 0; i < dim; ++i) {
                codes[i] = nearest_code(row[i], least[i], inverse[i], last_code);
            }
            store_tile_codes<code_columns, bits>(codes, dim, first + t, tile);
        }
    }
}

template <uint32_t bits>
void open_keys(const std::byte* tile, uint32_t tokens, uint32_t dim, uint32_t first, uint32_t count,
               float* rows) {
    float steps[widest_row], leasts[widest_row];
    for (uint32_t slot = first; slot < first + count; ++slot, rows += dim) {
        if (slot == first || slot % group == 0) {
            const std::byte* meta = tile + metadata_at<bits>(tokens, dim, slot);
            load_f16s(meta, dim, steps);
            load_f16s(meta + dim * 2, dim, leasts);
        }
        uint8_t codes[widest_row] = {};
        load_tile_codes<code_columns, bits>(tile, dim, slot, codes);
        for (uint32_t i = 0; i < dim; ++i) {
            rows[i] = static_cast<float>(codes[i]) * steps[i] + leasts[i];
        }
    }
}

template <uint32_t bits>
uint32_t encode_value(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    return encode_affine_groups<bits>(row, dim, group, record);
}

template <uint32_t bits>
void decode_value(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    decode_affine_groups<bits>(record, dim, group, row);
}

template <uint32_t bits>
constexpr format_description keys_of(uint32_t id, const char* name) {
    return {.id = id,
            .name = name,
            .kind = format_class::tile_local,
            .code_bits = bits,
            .tile = {.token_multiple = group,
                     .bytes = bytes_of_keys<bits>,
                     .seal = seal_keys<bits>,
                     .open = open_keys<bits>,
                     .reading = {whole_codes(bits), group, false}}};
}

template <uint32_t bits>
constexpr format_description values_of(uint32_t id, const char* name) {
    return {.id = id,
            .name = name,
            .kind = format_class::token_local,
            .code_bits = bits,
            .group = group,
            .group_bytes = 4,
            .reading = affine_reading<bits>,
            .encode = encode_value<bits>,
            .decode = decode_value<bits>};
}

}  // namespace

constinit const format_description kivi4_key_format = keys_of<4>(KV_FORMAT_KIVI4, "kivi4");
constinit const format_description kivi4_value_format = values_of<4>(KV_FORMAT_KIVI4, "kivi4");
constinit const format_description kivi2_key_format = keys_of<2>(KV_FORMAT_KIVI2, "kivi2");
constinit const format_description kivi2_value_format = values_of<2>(KV_FORMAT_KIVI2, "kivi2");

}  // namespace kvrt
