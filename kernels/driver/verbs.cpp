#include "driver/verbs.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "driver/attend_plan.hpp"
#include "driver/observe.hpp"
#include "format/position_rotation.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "kernels/attend_rows.hpp"
#include "kernels/describe.hpp"
#include "kernels/share.hpp"
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
static_assert(sizeof(kvrt_plan_copy) == sizeof(kernels::line_share));
static_assert(offsetof(kvrt_plan_copy, lines) == offsetof(kernels::line_share, lines));
static_assert(sizeof(kvrt_lane_mapping) == sizeof(kernels::lane_mapping));
static_assert(offsetof(kvrt_lane_mapping, block_table) ==
              offsetof(kernels::lane_mapping, block_table));

}  // namespace

status launch_share(kernel_functions& functions, stream_handle stream, device_pointer table,
                    const kvrt_share_plans& plans) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(table);
    kernels::share_parameters call;
    call.table = words;
    call.shares = reinterpret_cast<const kernels::line_share*>(words + plans.copies);
    call.mappings = reinterpret_cast<const kernels::lane_mapping*>(words + plans.mappings);
    call.share_count = plans.copy_count;
    call.most_lines = plans.most_lines;
    call.lanes = plans.lanes;
    call.rows = plans.rows;
    call.stride = plans.block_table_stride;
    call.block_shift = static_cast<uint32_t>(std::countr_zero(plans.block_tokens));
    return functions.launch(functions.share(), kernels::share_blocks(call), kernels::share_threads,
                            0, stream, &call);
}

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

namespace {

/// What an attention of a lane's blocks, as they are written or sealed, is launched with.
struct attend_reader {
    attend_functions* functions = nullptr;
    kernels::block_place place;
};

status find_reader(kernel_functions& functions, const kvrt_lane& lane, bool turns,
                   attend_reader& found) {
    KVRT_TRY(describe_lane(lane, "kv_attend", found.place));
    found.functions = functions.attend(found.place, turns);
    if (found.functions != nullptr) return KV_OK;
    return fail(KV_UNSUPPORTED,
                "kv_attend: keys of KV_FORMAT {} with values of {}{} in layout {}: no kernel "
                "of KV_DEVICE_CUDA reads them in this version (see docs/device.md)",
                lane.keys.format, lane.values.format,
                lane.keys.rotated != 0 || lane.values.rotated != 0 ? ", rotated," : "", lane.order);
}

kernels::rows_parameters parameters_of(const kvrt_attend_rows& rows) {
    kernels::rows_parameters call;
    call.arena = static_cast<const std::byte*>(rows.lane->arena);
    call.tables = tables_of(*rows.lane, rows.block_table, rows.block_table_stride);
    call.queries = place_of(rows.queries);
    call.out = place_of(rows.out);
    call.query_type = static_cast<kernels::number>(rows.queries.type);
    call.out_type = static_cast<kernels::number>(rows.out.type);
    float* const workspace = static_cast<float*>(rows.workspace);
    const uint64_t vectors = rows.most_partials * rows.query_heads;
    call.partials = {workspace, workspace + vectors, workspace + 2 * vectors};
    if (rows.observes != 0) call.kept = kept_of(rows);
    call.log_sum_exp = rows.log_sum_exp;
    call.query_heads = rows.query_heads;
    call.row_heads = rows.row_heads;
    call.scale = rows.scale;
    call.softcap = rows.softcap;
    call.sink_logits = rows.sink_logits;
    call.alibi_slopes = rows.alibi_slopes;
    call.window = rows.window != 0;
    call.window_sinks = rows.window_sinks;
    call.turning = {rows.turned_pairs, rows.turned_interleaved != 0, rows.turning_gain,
                    rows.turning_table};
    return call;
}

/// The grids of a captured launch.
status wave_to_capture(const kvrt_attend_rows& rows, kvrt_attend_wave& wave) {
    kvrt_attend_bounds bounds = rows.bounds;
    bound_attention(bounds);
    wave = {};
    wave.sequences = bounds.sequences;
    wave.joined_rows = bounds.joined_rows;
    const uint32_t most_pieces = std::min(bounds.pieces, rows.most_pieces);
    const kvrt_attend_wave& here = rows.waves[0];
    bool fits = rows.wave_count == 1;
    for (uint32_t kind = 0; kind < (rows.sealed != nullptr ? 2 : 1); ++kind) {
        wave.pieces[kind] = most_pieces;
        wave.row_pieces[kind] = bounds.row_pieces;
        fits = fits && here.pieces[kind] <= most_pieces;
    }
    if (fits) return KV_OK;
    return fail(KV_LIMIT,
                "kv_attend: a captured one has one launch for up to {} pieces of contexts, the "
                "step takes {} of {} and more: append fewer rows in a step",
                most_pieces, rows.wave_count, std::max(here.pieces[0], here.pieces[1]));
}

/// The pieces of one kind of blocks, then what joins them: all that a wave has.
status launch_wave(kernel_functions& functions, stream_handle stream, const kvrt_attend_rows& rows,
                   const kvrt_attend_wave& wave, const attend_reader (&readers)[2],
                   kernels::rows_parameters& call) {
    for (uint32_t kind = 0; kind < 2; ++kind) {
        const attend_reader& reader = readers[kind];
        const kvrt_lane* const lane = kind == 0 ? rows.lane : rows.sealed;
        if (lane == nullptr) continue;
        call.place = reader.place;
        call.positions = positions_of(lane->positions);
        call.sequences = reinterpret_cast<const kernels::attend_sequence*>(rows.sequences);
        if (wave.pieces[kind] != 0) {
            call.pieces = reinterpret_cast<const kernels::attend_piece*>(rows.pieces[kind]) +
                          wave.first_piece[kind];
            call.piece_count = wave.pieces[kind];
            call.most_rows = 1;  // vectors of more fit a tile, too
            kernels::attend_parameters few = call;
            KVRT_TRY(functions.launch(reader.functions->few, kernels::attend_blocks(few),
                                      kernels::attend_threads,
                                      reader.functions->few_bytes(call.place), stream, &few));
        }
        if (wave.row_pieces[kind] == 0) continue;
        call.row_pieces = reinterpret_cast<const kernels::rows_piece*>(rows.row_pieces[kind]) +
                          wave.first_row_piece[kind];
        call.row_piece_count = wave.row_pieces[kind];
        KVRT_TRY(functions.launch(reader.functions->many, kernels::rows_blocks(call),
                                  kernels::rows_threads, reader.functions->many_bytes(call.place),
                                  stream, &call));
    }
    if (wave.joined_rows == 0) return KV_OK;
    kernels::attend_parameters join = call;
    join.place = readers[0].place;
    join.sequences += wave.first_sequence;
    join.sequence_count = wave.sequences;
    join.most_rows = wave.joined_rows;
    return functions.launch(functions.join(), kernels::join_blocks(join), kernels::attend_threads,
                            0, stream, &join);
}

}  // namespace

status launch_attend(kernel_functions& functions, stream_handle stream, bool captured,
                     const kvrt_attend_rows& rows) {
    const bool turns = rows.turned_pairs != 0;
    if (turns && rows.turned_interleaved == 0 && rows.turned_pairs % kernels::lane_channels != 0) {
        return fail(KV_UNSUPPORTED,
                    "kv_attend: {} bands are turned by slots: on KV_DEVICE_CUDA they are a "
                    "multiple of {}, or interleaved",
                    rows.turned_pairs, kernels::lane_channels);
    }
    attend_reader readers[2];
    KVRT_TRY(find_reader(functions, *rows.lane, turns, readers[0]));
    if (rows.sealed != nullptr) KVRT_TRY(find_reader(functions, *rows.sealed, turns, readers[1]));
    kernels::rows_parameters call = parameters_of(rows);
    if (captured) {
        kvrt_attend_wave wave;
        KVRT_TRY(wave_to_capture(rows, wave));
        KVRT_TRY(launch_wave(functions, stream, rows, wave, readers, call));
        return launch_observe(functions, stream, true, rows, 0);
    }
    for (uint32_t i = 0; i < rows.wave_count; ++i) {
        KVRT_TRY(launch_wave(functions, stream, rows, rows.waves[i], readers, call));
        KVRT_TRY(launch_observe(functions, stream, false, rows, i));
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
