#include "format/rows.hpp"

#include <cstring>

#include "format/rotation.hpp"

namespace kvrt {

void gather_record(const operand_layout& operand, const std::byte* block, uint32_t slot,
                   uint32_t head, std::byte* record) {
    const std::byte* source = block + operand.at(slot, head, 0);
    if (operand.inline_form) {
        from_inline(*operand.format, operand.dim, source, record);
        return;
    }
    if (operand.word_stride == 1) {
        std::memcpy(record, source, operand.row_bytes());
        return;
    }
    const int64_t step = operand.word_stride * int64_t{record_word};
    for (uint32_t word = 0; word < operand.words; ++word, source += step) {
        std::memcpy(record + word * record_word, source, record_word);
    }
}

void put_record(const operand_layout& operand, std::byte* block, uint32_t slot, uint32_t head,
                const std::byte* record) {
    std::byte* target = block + operand.at(slot, head, 0);
    if (operand.inline_form) return to_inline(*operand.format, operand.dim, record, target);
    const int64_t step = operand.word_stride * int64_t{record_word};
    for (uint32_t word = 0; word < operand.words; ++word, target += step) {
        std::memcpy(target, record + word * record_word, record_word);
    }
}

uint32_t store_row(const operand_layout& operand, std::byte* block, uint32_t slot, uint32_t head,
                   const float* row) {
    if (operand.plain()) {
        for (uint32_t i = 0; i < operand.dim; ++i) {
            store_element(block + operand.at(slot, head, i), operand.type, row[i]);
        }
        return 0;
    }
    alignas(record_word) std::byte record[most_record_bytes] = {};  // with its padding
    const uint32_t saturated =
        operand.format->encode(row, operand.dim, operand.constants(head), record);
    put_record(operand, block, slot, head, record);
    return saturated;
}

void read_stored_row(const operand_layout& operand, const std::byte* block, uint32_t slot,
                     uint32_t head, uint32_t position, float* row) {
    if (operand.plain()) {
        for (uint32_t i = 0; i < operand.dim; ++i) {
            row[i] = load_element(block + operand.at(slot, head, i), operand.type);
        }
    } else if (operand.tiled()) {
        operand.open_tile(block, head, slot, 1, row);
    } else {
        alignas(record_word) std::byte record[most_record_bytes];
        gather_record(operand, block, slot, head, record);
        row_constants constants = operand.constants(head);
        constants.position = position;
        operand.format->decode(record, operand.dim, constants, row);
    }
}

void read_row(const operand_layout& operand, const std::byte* block, uint32_t slot, uint32_t head,
              uint32_t position, float* row) {
    read_stored_row(operand, block, slot, head, position, row);
    if (operand.rotated) rotate_row(row, operand.dim);
}

}  // namespace kvrt
