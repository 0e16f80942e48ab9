#include "driver/verbs.hpp"

#include <cstring>

#include "format/position_rotation.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "kernels/describe.hpp"
#include "kernels/write.hpp"

namespace kvrt::cuda {

namespace {

/// The library's own description, as far as the seam carries it: kernels are told from that.
operand_layout layout_of(const kvrt_operand& operand, format_description& format,
                         position_rotation& turning) {
    format.id = operand.format;
    format.kind = static_cast<format_class>(operand.kind);
    operand_layout made;
    made.format = &format;
    made.type = static_cast<element>(operand.type);
    made.dim = operand.dim;
    made.words = operand.words;
    made.word_bytes = operand.word_bytes;
    made.offset = operand.offset;
    made.group_stride = operand.group_stride;
    made.slot_stride = operand.slot_stride;
    made.head_stride = operand.head_stride;
    made.word_stride = operand.word_stride;
    made.rotated = operand.rotated != 0;
    made.inline_form = operand.inline_form != 0;
    made.tile_tokens = operand.tile_tokens;
    turning.pairs = operand.turned_pairs;
    turning.interleaved = operand.turned_interleaved != 0;
    turning.gain = operand.turning_gain;
    made.turning = &turning;
    return made;
}

void add_constants(const kvrt_operand& operand, kernels::operand_place& place) {
    place.scales = operand.scales;
    place.channel_means = operand.channel_means;
    place.channel_scales = operand.channel_scales;
    place.turning.table = operand.turning_table;
}

kernels::tensor_place place_of(const kvrt_device_tensor& tensor) {
    return {static_cast<std::byte*>(tensor.data), tensor.row_stride, tensor.head_stride,
            tensor.dim_stride};
}

kernels::block_tables tables_of(const kvrt_lane& lane, const uint32_t* ids, uint64_t stride) {
    return {ids, stride, lane.id_shift};
}

// The seam's lists are the kernels'.
static_assert(sizeof(kernels::row_target) == 3 * sizeof(uint32_t));
static_assert(sizeof(kvrt_attend_sequence) == sizeof(kernels::attend_sequence));
static_assert(offsetof(kvrt_attend_sequence, slots) == offsetof(kernels::attend_sequence, slots));
static_assert(offsetof(kvrt_attend_sequence, window_first) ==
              offsetof(kernels::attend_sequence, window_first));
static_assert(offsetof(kvrt_attend_sequence, pieces) == offsetof(kernels::attend_sequence, pieces));
static_assert(sizeof(kvrt_attend_piece) == sizeof(kernels::attend_piece));
static_assert(offsetof(kvrt_attend_piece, partial) == offsetof(kernels::attend_piece, partial));

}  // namespace

status describe_lane(const kvrt_lane& lane, const char* verb, kernels::block_place& place) {
    format_description key_format, value_format;
    position_rotation key_turning, value_turning;
    tile_layout layout;
    layout.order = static_cast<tile_order>(lane.order);
    layout.block_tokens = lane.block_tokens;
    layout.kv_heads = lane.kv_heads;
    layout.block_bytes = lane.block_bytes;
    layout.keys = layout_of(lane.keys, key_format, key_turning);
    layout.values = layout_of(lane.values, value_format, value_turning);
    if (!kernels::describe(layout, place)) {
        return fail(KV_UNSUPPORTED,
                    "{}: keys of KV_FORMAT {} with values of {} in layout {}: not on "
                    "KV_DEVICE_CUDA in this version (see docs/device.md)",
                    verb, lane.keys.format, lane.values.format, lane.order);
    }
    add_constants(lane.keys, place.keys);
    add_constants(lane.values, place.values);
    return KV_OK;
}

kernels::position_place positions_of(const kvrt_positions& positions) {
    return {positions.base,           positions.reciprocal,
            positions.units_per_slab, positions.blocks_per_slab,
            positions.block_stride,   positions.block_tokens};
}

status launch_write(kernel_functions& functions, stream_handle stream,
                    const kvrt_write_rows& rows) {
    const kvrt_lane& lane = *rows.lane;
    kernels::write_parameters call;
    KVRT_TRY(describe_lane(lane, "kv_write", call.place));
    if (rows.keys.type != rows.values.type) {
        return fail(KV_UNSUPPORTED,
                    "kv_write: keys of dtype {} and values of {}: on KV_DEVICE_CUDA both are of "
                    "one",
                    rows.keys.type, rows.values.type);
    }
    call.arena = static_cast<std::byte*>(const_cast<void*>(lane.arena));
    call.tables = tables_of(lane, rows.block_table, rows.block_table_stride);
    call.targets = reinterpret_cast<const kernels::row_target*>(rows.targets);
    call.rows = rows.rows;
    call.keys = place_of(rows.keys);
    call.values = place_of(rows.values);
    call.saturated_keys = rows.saturated_keys;
    call.saturated_values = rows.saturated_values;
    return functions.launch(
        functions.write(static_cast<kernels::number>(rows.keys.type), call.place.keys.codes),
        kernels::write_blocks(rows.rows, lane.kv_heads), kernels::write_threads,
        kernels::write_shared_bytes, stream, &call);
}

status launch_attend(kernel_functions& functions, stream_handle stream, bool captured,
                     const kvrt_attend_rows& rows) {
    const kvrt_lane& lane = *rows.lane;
    kernels::attend_parameters call;
    KVRT_TRY(describe_lane(lane, "kv_attend", call.place));
    attend_function* const reader = functions.attend(call.place);
    if (reader == nullptr) {
        return fail(KV_UNSUPPORTED,
                    "kv_attend: keys of KV_FORMAT {} with values of {}{} in layout {}: no kernel "
                    "of KV_DEVICE_CUDA reads them in this version (see docs/device.md)",
                    lane.keys.format, lane.values.format,
                    lane.keys.rotated != 0 || lane.values.rotated != 0 ? ", rotated," : "",
                    lane.order);
    }
    call.arena = static_cast<const std::byte*>(lane.arena);
    call.tables = tables_of(lane, rows.block_table, rows.block_table_stride);
    call.sequences = reinterpret_cast<const kernels::attend_sequence*>(rows.sequences);
    call.pieces = reinterpret_cast<const kernels::attend_piece*>(rows.pieces);
    call.sequence_count = rows.sequence_count;
    call.piece_count = captured ? rows.captured_pieces : rows.piece_count;
    call.queries = place_of(rows.queries);
    call.out = place_of(rows.out);
    call.query_type = static_cast<kernels::number>(rows.queries.type);
    call.out_type = static_cast<kernels::number>(rows.out.type);
    float* const workspace = static_cast<float*>(rows.workspace);
    const uint64_t vectors = rows.most_partials * rows.query_heads;
    call.partials = {workspace, workspace + vectors, workspace + 2 * vectors};
    call.positions = positions_of(lane.positions);
    call.log_sum_exp = rows.log_sum_exp;
    call.query_heads = rows.query_heads;
    call.row_heads = rows.row_heads;
    call.scale = rows.scale;
    call.softcap = rows.softcap;
    call.sink_logits = rows.sink_logits;
    call.alibi_slopes = rows.alibi_slopes;
    call.window = rows.window != 0;
    call.window_sinks = rows.window_sinks;
    call.most_rows = rows.most_rows;
    KVRT_TRY(functions.launch(reader->function, kernels::attend_blocks(call),
                              kernels::attend_threads, reader->shared_bytes(call.place), stream,
                              &call));
    return functions.launch(functions.join(), kernels::join_blocks(call), kernels::attend_threads,
                            0, stream, &call);
}

}  // namespace kvrt::cuda
