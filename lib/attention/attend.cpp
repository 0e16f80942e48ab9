// Cutting attention into pieces, running them, joining them.
//
//   task    a tile of rows of one item of one call; has its partial softmaxes in the workspace
//   piece   a stretch of the task's slots; stretches depend on the item's own length alone, and on
//           which of its blocks are sealed
//   unit    what one thread takes: a piece of some KV heads. Heads do not mix, so how they are
//           dealt out to threads does not show in the result
//   wave    as many tasks as fit into the workspace
#include "attention/attend.hpp"

#include <algorithm>

#include "attention/kernels.hpp"
#include "base/checked.hpp"

namespace kvrt {

namespace {

/// Up to here an item's rows are few enough that its context is cut: decode and draft verification.
constexpr uint32_t max_cut_rows = 8;
constexpr uint32_t min_piece_slots = 512;
constexpr uint32_t max_pieces = 128;
constexpr uint32_t max_tasks = 256;

uint32_t piece_slots(uint32_t slots) {
    return std::max(min_piece_slots, round_up(ceil_divide(slots, max_pieces), run_slots));
}

uint32_t rows_per_task(const attend_layer& layer) {
    return std::max(1u, blocked_vectors(layer) / (layer.query_heads / layer.kv_heads));
}

/// Floats of one piece's partial softmaxes: largest, sum and values of [rows][query heads]. One
/// stride serves all three arrays of consecutive pieces.
uint64_t partial_floats(const attend_layer& layer, uint32_t rows) {
    return round_up<uint64_t>(
        uint64_t{rows} * layer.query_heads * (layer.layout.values.dim + uint64_t{2}), 16);
}

uint64_t plain_query_floats(const attend_layer& layer) {
    return round_up<uint64_t>(uint64_t{layer.query_heads} * layer.layout.keys.dim, 16);
}

/// Sealed blocks or the others: each has a layout, and its own way to be read.
struct stretch {
    const tile_layout* layout = nullptr;
    uint32_t first_slot = 0, end_slot = 0;
    uint32_t pieces = 0;
    bool decode = false;
    uint64_t coded_offset = 0;  ///< of its integer-coded queries, in floats behind the plain ones
};

/// Of a decode: the row's queries, and behind them the same for the integer codes of each layout,
/// with what encoding them said of each KV head.
uint64_t coded_bytes(const attend_layer& layer, const tile_layout& layout) {
    return (uint64_t{layer.query_heads} + spare_coded_queries) * coded_query_bytes(layout);
}
uint64_t coded_query_floats(const attend_layer& layer, const tile_layout& layout) {
    const uint64_t bytes = coded_bytes(layer, layout);
    return bytes == 0 ? 0 : (bytes + round_up(layer.kv_heads, 64u)) / sizeof(float);
}
uint64_t query_floats(const attend_layer& layer) {
    uint64_t floats = plain_query_floats(layer) + coded_query_floats(layer, layer.layout);
    if (layer.seals()) floats += coded_query_floats(layer, layer.sealed_layout);
    return floats;
}

struct task {
    const attend_call* call;
    const attend_item* item;
    uint32_t first_row, end_row;
    uint32_t slots;  ///< seen by its last row
    uint32_t pieces, slots_per_piece;
    stretch sealed, open;
    bool decode;     ///< some stretch is decoded
    float* queries;  ///< of a decode
    float* partials;
    bool observed;      ///< the item's observer counts a row of it
    kept_weights kept;  ///< of an observed task
    uint64_t stride;
    uint32_t first_unit;

    uint32_t rows() const { return end_row - first_row; }
    std::byte* coded_queries(const attend_layer& layer, const stretch& part) const {
        return reinterpret_cast<std::byte*>(queries + plain_query_floats(layer) +
                                            part.coded_offset);
    }
    uint8_t* float_queries(const attend_layer& layer, const stretch& part) const {
        return reinterpret_cast<uint8_t*>(coded_queries(layer, part) +
                                          coded_bytes(layer, *part.layout));
    }
    uint32_t units(const attend_layer& layer, uint32_t decode_parts) const {
        return sealed.pieces * (sealed.decode ? decode_parts : layer.kv_heads) +
               open.pieces * (open.decode ? decode_parts : layer.kv_heads);
    }
    partial_softmax partial(const attend_layer& layer, uint32_t piece) const {
        float* base = partials + piece * stride;
        const uint64_t vectors = uint64_t{rows()} * layer.query_heads;
        return {base + vectors * layer.layout.values.dim,
                base + vectors * (layer.layout.values.dim + uint64_t{1}), base};
    }
};

task make_task(const attend_call& call, const attend_item& item, uint32_t first_row) {
    const attend_layer& layer = *call.layer;
    task made{};
    made.call = &call;
    made.item = &item;
    made.first_row = first_row;
    made.end_row = std::min(item.rows, first_row + rows_per_task(layer));
    made.slots = item.slots - (item.rows - made.end_row);
    const bool cut = item.rows <= max_cut_rows;
    made.slots_per_piece = cut ? piece_slots(item.slots) : round_up(made.slots, run_slots);
    const uint32_t sealed = std::min(made.slots, item.sealed_blocks * layer.layout.block_tokens);
    made.sealed = {&layer.sealed_layout, 0, sealed};
    made.open = {&layer.layout, sealed, made.slots};
    if (layer.seals()) made.open.coded_offset = coded_query_floats(layer, layer.sealed_layout);
    for (stretch* part : {&made.sealed, &made.open}) {
        part->pieces = ceil_divide(part->end_slot - part->first_slot, made.slots_per_piece);
        part->decode = part->pieces != 0 && item.rows == 1 && decode_reads(layer, *part->layout);
    }
    made.decode = made.sealed.decode || made.open.decode;
    made.pieces = made.sealed.pieces + made.open.pieces;
    made.stride = partial_floats(layer, made.rows());
    made.observed = item.observer != nullptr && item.observer->first_row < made.end_row;
    return made;
}

/// What is kept of so many vectors and slots: its shape, its size, and its place.
kept_weights shape_of_kept(uint32_t vectors, uint32_t slots) {
    const uint32_t registers = ceil_divide(ceil_divide(slots, slot_group), widest_register);
    kept_weights shape;
    shape.vectors = vectors;
    shape.group_stride = (registers / 2 * 2 + 1) * widest_register;
    return shape;
}
uint64_t log_sum_floats(const kept_weights& shape) {
    return round_up(shape.vectors, widest_register);
}
uint64_t kept_floats(const kept_weights& shape, uint32_t slots) {
    const uint64_t weights = uint64_t{round_up(slots, run_slots)} * shape.vectors;
    return log_sum_floats(shape) + uint64_t{shape.vectors} * shape.group_stride + weights / 2;
}
void place_kept(float* memory, kept_weights& kept) {
    kept.log_sums = memory;
    kept.largest = memory + log_sum_floats(kept);
    kept.weights =
        reinterpret_cast<uint16_t*>(kept.largest + uint64_t{kept.vectors} * kept.group_stride);
}

/// Walks the tasks of all items of all calls in order.
struct task_cursor {
    const attend_call* call = nullptr;
    const attend_call* end_call = nullptr;
    uint32_t item = 0;
    uint32_t row = 0;

    bool done() {
        for (; call != end_call; ++call, item = 0) {
            for (; item < call->item_count; ++item, row = 0) {
                if (row < call->items[item].rows) return false;
            }
        }
        return true;
    }
};

struct wave {
    task tasks[max_tasks];
    uint32_t count = 0;
    uint32_t units = 0;
    uint32_t decode_parts = 1;  ///< into which a decode piece's KV heads are dealt
};

/// Takes tasks until the workspace or the wave is full; at least one fits.
void fill_wave(const attend_call& first, task_cursor& cursor, wave& out) {
    const attend_layer& layer = *first.layer;
    float* next = reinterpret_cast<float*>(first.workspace);
    uint64_t room = first.workspace_bytes / sizeof(float);
    out.count = 0;
    while (out.count < max_tasks && !cursor.done()) {
        task made = make_task(*cursor.call, cursor.call->items[cursor.item], cursor.row);
        const uint64_t queries = made.decode ? query_floats(layer) : 0;
        const uint64_t partials = made.pieces * made.stride;
        uint64_t kept = 0;
        if (made.observed) {
            made.kept = shape_of_kept(made.rows() * layer.query_heads, made.slots);
            kept = kept_floats(made.kept, made.slots);
        }
        if (queries + partials + kept > room) break;
        made.queries = next;
        made.partials = next + queries;
        if (made.observed) place_kept(made.partials + partials, made.kept);
        room -= queries + partials + kept;
        next += queries + partials + kept;
        out.tasks[out.count++] = made;
        cursor.row = made.end_row;
    }
}

void number_units(const attend_layer& layer, uint32_t concurrency, wave& out) {
    uint32_t pieces = 0;
    for (uint32_t t = 0; t < out.count; ++t) pieces += out.tasks[t].pieces;
    out.decode_parts = pieces < 4 * concurrency ? layer.kv_heads : 1;
    out.units = 0;
    for (uint32_t t = 0; t < out.count; ++t) {
        out.tasks[t].first_unit = out.units;
        out.units += out.tasks[t].units(layer, out.decode_parts);
    }
}

void run_unit(const attend_layer& layer, const wave& in, uint32_t unit) {
    const task* end = in.tasks + in.count;
    const task& mine = *(std::upper_bound(in.tasks, end, unit,
                                          [](uint32_t value, const task& candidate) {
                                              return value < candidate.first_unit;
                                          }) -
                         1);
    const uint32_t sealed_parts = mine.sealed.decode ? in.decode_parts : layer.kv_heads;
    const uint32_t sealed_units = mine.sealed.pieces * sealed_parts;
    uint32_t place = unit - mine.first_unit;
    const bool sealed = place < sealed_units;
    if (!sealed) place -= sealed_units;
    const stretch& from = sealed ? mine.sealed : mine.open;
    const uint32_t parts = from.decode ? in.decode_parts : layer.kv_heads;
    const uint32_t part = place % parts;
    const uint32_t number = place / parts;
    const partial_softmax partial = mine.partial(layer, number + (sealed ? 0 : mine.sealed.pieces));
    attend_piece piece;
    piece.call = mine.call;
    piece.item = mine.item;
    piece.layout = from.layout;
    piece.first_slot = from.first_slot + number * mine.slots_per_piece;
    piece.end_slot = std::min(from.end_slot, piece.first_slot + mine.slots_per_piece);
    piece.first_head = parts == 1 ? 0 : part;
    piece.end_head = parts == 1 ? layer.kv_heads : part + 1;
    piece.first_row = mine.first_row;
    piece.end_row = mine.end_row;
    piece.queries = mine.queries;
    piece.kept = mine.observed ? &mine.kept : nullptr;
    if (from.decode) {
        piece.coded_queries = mine.coded_queries(layer, from);
        piece.float_queries = mine.float_queries(layer, from);
        attend_decode(piece, partial);
    } else {
        attend_blocked(piece, partial);
    }
}

/// Joins the pieces of a task's rows for the query heads of one KV head.
void join_rows(const attend_layer& layer, const task& mine, uint32_t kv_head) {
    const uint32_t group = layer.query_heads / layer.kv_heads;
    for (uint32_t row = 0; row < mine.rows(); ++row) {
        for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            const uint32_t vector = row * layer.query_heads + head;
            const float log_sum =
                join_pieces(*mine.call, mine.partial(layer, 0), mine.stride, mine.pieces, vector,
                            mine.item->first_row + mine.first_row + row, head);
            if (mine.observed) mine.kept.log_sums[vector] = log_sum;
        }
    }
}

/// Hands what the tasks of an item that begin at `first` kept of a stretch of slots to its
/// observer.
void observe(const attend_layer& layer, const wave& in, uint32_t first, uint32_t stretch) {
    constexpr uint32_t at_once = 16;  // tasks
    const attend_item* item = in.tasks[first].item;
    const uint32_t first_slot = stretch * observed_slots;
    const uint32_t end_slot = std::min(item->slots, first_slot + observed_slots);
    uint32_t t = first;
    while (t < in.count && in.tasks[t].item == item) {
        observed_rows rows[at_once];
        const bool begins = in.tasks[t].first_row == 0;
        uint32_t count = 0;
        for (; count < at_once && t < in.count && in.tasks[t].item == item; ++t, ++count) {
            const task& mine = in.tasks[t];
            rows[count] = {item,           layer.query_heads, layer.query_heads / layer.kv_heads,
                           mine.first_row, mine.end_row,      mine.kept};
        }
        observe_rows(rows, count, layer.kv_heads, first_slot, end_slot, begins);
    }
}

/// The observers of a wave's items, each with its item's first task, cut into stretches of slots.
void observe_wave(const attend_layer& layer, const wave& in, executor& threads) {
    uint32_t first_task[max_tasks], first_unit[max_tasks];
    uint32_t count = 0, units = 0;
    for (uint32_t t = 0; t < in.count; ++t) {
        const attend_item* item = in.tasks[t].item;
        if (item->observer == nullptr || (t != 0 && in.tasks[t - 1].item == item)) continue;
        first_task[count] = t;
        first_unit[count++] = units;
        units += ceil_divide(item->slots, observed_slots);
    }
    threads.for_each(units, [&](uint32_t unit) {
        const uint32_t* after = std::upper_bound(first_unit, first_unit + count, unit);
        const std::ptrdiff_t place = after - first_unit - 1;
        observe(layer, in, first_task[place], unit - first_unit[place]);
    });
}

uint64_t position_of(const attend_item& item, const lane_positions& positions, uint32_t kv_head,
                     uint32_t slot) {
    return slot >= item.explicit_slots ? item.next_position - (item.slots - slot)
                                       : positions.of(item.blocks, slot, kv_head);
}

}  // namespace

void positions_of_slots(const attend_call& call, const attend_item& item, uint32_t kv_head,
                        uint32_t first, uint32_t count, uint32_t* out) {
    const lane_positions positions = call.positions_of(item);
    const uint32_t end = first + count, end_explicit = std::min(end, item.explicit_slots);
    uint32_t slot = first;
    while (slot < end_explicit) {  // those of a block lie side by side
        const uint32_t block_tokens = call.layer->layout.block_tokens;
        const uint32_t here = std::min(end_explicit - slot, block_tokens - slot % block_tokens);
        out = std::copy_n(&positions.of(item.blocks, slot, kv_head), here, out);
        slot += here;
    }
    for (; slot < end; ++slot) {
        *out++ = static_cast<uint32_t>(item.next_position - (item.slots - slot));
    }
}

void relative_positions(const attend_call& call, const attend_item& item, uint32_t kv_head,
                        uint32_t first, uint32_t count, uint64_t origin, float* out) {
    const lane_positions positions = call.positions_of(item);
    for (uint32_t i = 0; i < count; ++i) {
        const uint64_t position = position_of(item, positions, kv_head, first + i);
        out[i] = static_cast<float>(static_cast<int64_t>(position) - static_cast<int64_t>(origin));
    }
}

uint64_t attend_workspace_bytes(const attend_layer& layer, uint32_t max_slots, bool observed) {
    const uint64_t pieces = ceil_divide(max_slots, piece_slots(max_slots));
    const uint64_t stretches = layer.seals() ? 2 : 1;
    const uint64_t most_pieces = std::min<uint64_t>(max_pieces, pieces + 1) + stretches - 1;
    const uint32_t rows = rows_per_task(layer);
    const uint64_t cut = most_pieces * partial_floats(layer, std::min(rows, max_cut_rows));
    const uint64_t kept =
        observed ? kept_floats(shape_of_kept(rows * layer.query_heads, max_slots), max_slots) : 0;
    return (std::max(cut, stretches * partial_floats(layer, rows)) + query_floats(layer) + kept) *
           sizeof(float);
}

void attend(const attend_call* calls, uint32_t call_count, executor& threads) {
    const attend_layer& layer = *calls[0].layer;  // of the shape of all
    const auto has_observers = [](const attend_call& call) {
        return std::any_of(call.items, call.items + call.item_count,
                           [](const attend_item& item) { return item.observer != nullptr; });
    };
    const bool observed = std::any_of(calls, calls + call_count, has_observers);
    task_cursor cursor{calls, calls + call_count};
    wave current;
    while (!cursor.done()) {
        fill_wave(calls[0], cursor, current);
        number_units(layer, threads.concurrency(), current);
        threads.for_each(current.count, [&](uint32_t t) {
            task& mine = current.tasks[t];
            if (mine.decode) {
                load_queries(*mine.call, *mine.item, 0, 0, layer.query_heads, mine.queries);
                if (layer.slot_turning != nullptr) return;  // keys become floats
                for (stretch* part : {&mine.sealed, &mine.open}) {
                    if (!part->decode || coded_query_bytes(*part->layout) == 0) continue;
                    encode_queries(*part->layout, layer.query_heads, mine.queries,
                                   mine.coded_queries(layer, *part),
                                   mine.float_queries(layer, *part));
                }
            }
        });
        threads.for_each(current.units, [&](uint32_t unit) { run_unit(layer, current, unit); });
        threads.for_each(current.count * layer.kv_heads, [&](uint32_t unit) {
            join_rows(layer, current.tasks[unit / layer.kv_heads], unit % layer.kv_heads);
        });
        if (observed) observe_wave(layer, current, threads);
    }
}

}  // namespace kvrt
