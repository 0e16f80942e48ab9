#include "driver/attend_plan.hpp"

#include <algorithm>
#include <cstddef>

#include "base/checked.hpp"
#include "kernels/attend_rows.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

// The seam's lists are the kernels'.
static_assert(sizeof(kvrt_attend_sequence) == sizeof(attend_sequence));
static_assert(offsetof(kvrt_attend_sequence, slots) == offsetof(attend_sequence, slots));
static_assert(offsetof(kvrt_attend_sequence, window_first) ==
              offsetof(attend_sequence, window_first));
static_assert(offsetof(kvrt_attend_sequence, pieces) == offsetof(attend_sequence, pieces));
static_assert(offsetof(kvrt_attend_sequence, kept) == offsetof(attend_sequence, kept));
static_assert(offsetof(kvrt_attend_sequence, kept_rows) == offsetof(attend_sequence, kept_rows));
static_assert(sizeof(kvrt_attend_piece) == sizeof(attend_piece));
static_assert(offsetof(kvrt_attend_piece, partial) == offsetof(attend_piece, partial));
static_assert(sizeof(kvrt_rows_piece) == sizeof(rows_piece));
static_assert(offsetof(kvrt_rows_piece, partial) == offsetof(rows_piece, partial));

constexpr uint32_t enough_vectors = enough_sets * set_vectors;

bool is_few(const kvrt_attend_view& view, uint32_t rows) {
    return uint64_t{rows} * view.group <= query_rows;
}

/// Rows of a lane that seals are listed as several sequences where they are very many: their
/// contexts have two pieces, whose partial results shall fit the workspace.
uint32_t listed_rows(const kvrt_attend_view& view) {
    return view.seals == 0 ? ~uint32_t{0} : std::max(1u, enough_vectors / view.group);
}

/// Entries of a kept row of a sequence of so many slots.
uint32_t entries_of_row(uint32_t slots) { return ceil_divide(slots, slots_of_group) + 1; }
/// Rows of which weights are kept are listed as several sequences where they are more than that.
uint32_t most_kept_rows(uint32_t most_kept, uint32_t slots) {
    return std::max(1u, most_kept / entries_of_row(slots));
}

/// The step's lists as they are made.
struct plan_maker {
    kvrt_attend_plan& plan;
    uint64_t partial = 0;  ///< the wave's next

    void begin_wave() {
        kvrt_attend_wave& wave = plan.waves[plan.wave_count++];
        wave = {};
        wave.first_sequence = plan.sequence_count;
        for (uint32_t kind = 0; kind < 2; ++kind) {
            wave.first_piece[kind] = plan.piece_count[kind];
            wave.first_row_piece[kind] = plan.row_piece_count[kind];
        }
        partial = 0;
    }
    /// The wave that a sequence with so many partial results and kept entries belongs to.
    kvrt_attend_wave& wave_of(uint64_t partials, uint32_t kept) {
        const auto fits = [&] {
            const kvrt_attend_wave& last = plan.waves[plan.wave_count - 1];
            return partial + partials <= plan.most_partials &&
                   (kept == 0 || kept <= plan.most_kept - last.kept);
        };
        if (plan.wave_count == 0 || !fits()) begin_wave();
        return plan.waves[plan.wave_count - 1];
    }

    /// An entry of the list of sequences, with `pieces` partial results for each row.
    kvrt_attend_wave& add_sequence(const kvrt_attend_sequence& what, uint32_t pieces) {
        const uint64_t partials = uint64_t{pieces} * what.rows;
        const uint32_t kept = what.kept_rows == 0 ? 0 : what.kept_rows * entries_of_row(what.slots);
        kvrt_attend_wave& wave = wave_of(partials, kept);
        ++wave.sequences;
        kvrt_attend_sequence& listed = plan.sequences[plan.sequence_count++];
        listed = what;
        listed.first_partial = static_cast<uint32_t>(partial);
        listed.pieces = pieces;
        listed.kept = wave.kept;
        wave.kept += kept;
        if (pieces != 0) wave.joined_rows = std::max(wave.joined_rows, what.rows);
        partial += partials;
        return wave;
    }

    void add_few(const kvrt_attend_sequence& what) {
        const uint32_t each = attend_piece_slots(what.slots), sealed = what.sealed_slots;
        const uint32_t pieces = ceil_divide(sealed, each) + ceil_divide(what.slots - sealed, each);
        kvrt_attend_wave& wave = add_sequence(what, pieces);
        const uint32_t index = plan.sequence_count - 1;
        uint32_t to = plan.sequences[index].first_partial;
        for (uint32_t slot = 0; slot < what.slots; to += what.rows) {
            const uint32_t kind = slot < sealed ? 1 : 0;
            // The last one may reach beyond the sequence, where nothing is seen: so it stays what
            // it is while the sequence grows.
            const uint32_t end = kind == 1 ? std::min(slot + each, sealed) : slot + each;
            plan.pieces[kind][plan.piece_count[kind]++] = {index, slot, end, to};
            ++wave.pieces[kind];
            slot = end;
        }
    }

    void add_many(const kvrt_attend_sequence& what) {
        const kvrt_attend_view& view = plan.view;
        const rows_cut cut = cut_rows(what.rows, view.group, what.slots,
                                      view.window == 0 ? 0 : what.window_first, view.window_sinks);
        // A piece that lies in blocks of both kinds is one of each.
        uint32_t pieces = cut.pieces;
        for (uint32_t i = 0; i < cut.pieces; ++i) {
            const rows_piece piece = cut.piece(0, 0, i, 0);
            if (piece.first_slot < what.sealed_slots && what.sealed_slots < piece.end_slot) {
                ++pieces;
            }
        }
        kvrt_attend_wave& wave = add_sequence(what, pieces == 1 ? 0 : pieces);
        const uint32_t index = plan.sequence_count - 1;
        const uint32_t first = plan.sequences[index].first_partial;
        // The last rows see most.
        for (uint32_t tile = cut.tiles; tile-- > 0;) {
            uint32_t to = first;
            for (uint32_t i = 0; i < cut.pieces; ++i) {
                const rows_piece whole = cut.piece(index, tile, i, 0);
                for (uint32_t slot = whole.first_slot; slot < whole.end_slot; to += what.rows) {
                    const uint32_t kind = slot < what.sealed_slots ? 1 : 0;
                    const uint32_t end =
                        kind == 1 ? std::min(what.sealed_slots, whole.end_slot) : whole.end_slot;
                    plan.row_pieces[kind][plan.row_piece_count[kind]++] = {
                        index,         whole.first_vector,
                        whole.vectors, slot,
                        end,           pieces == 1 ? written_at_once : to};
                    ++wave.row_pieces[kind];
                    slot = end;
                }
            }
        }
    }

    void add(const kvrt_attend_sequence& item) {
        const uint32_t most = listed_rows(plan.view);
        const uint32_t most_kept = most_kept_rows(plan.most_kept, item.slots);
        const uint32_t first_kept = item.rows - item.kept_rows;
        for (uint32_t row = 0; row < item.rows;) {
            const uint32_t before = first_kept > row ? first_kept - row : 0;
            const uint32_t room = item.kept_rows == 0 ? item.rows : before + most_kept;
            const uint32_t rows = std::min({most, item.rows - row, room});
            const uint32_t behind = item.rows - row - rows;
            kvrt_attend_sequence part = item;
            part.first_row += row;
            part.rows = rows;
            part.kept_rows = rows - std::min(rows, before);
            part.slots -= behind;
            part.next_position -= behind;
            part.window_first += static_cast<int32_t>(row);
            if (is_few(plan.view, rows)) {
                add_few(part);
            } else {
                add_many(part);
            }
            row += rows;
        }
    }
};

/// Are the pieces of an item, and all that is listed of it but lengths, as they were?
bool advances(const kvrt_attend_view& view, const kvrt_attend_sequence& before,
              const kvrt_attend_sequence& item) {
    const uint32_t each = attend_piece_slots(item.slots);
    return before.table == item.table && before.first_row == item.first_row &&
           before.rows == item.rows && before.explicit_slots == item.explicit_slots &&
           (before.sealed_slots | item.sealed_slots) == 0 &&
           (before.kept_rows | item.kept_rows) == 0 && is_few(view, item.rows) &&
           attend_piece_slots(before.slots) == each &&
           before.pieces == ceil_divide(item.slots, each);
}

}  // namespace

void bound_attention(kvrt_attend_bounds& bounds) {
    const kvrt_attend_view& view = bounds.view;
    const uint32_t split = view.seals != 0 ? 1 : 0;  // the piece that lies in blocks of both kinds
    const uint32_t item_rows = std::min(bounds.item_rows, bounds.rows);
    bounds.sequences = bounds.items + (split == 0 ? 0 : bounds.rows / listed_rows(view));
    uint32_t few = bounds.sequences;
    if (bounds.most_kept != 0) {
        const uint32_t kept =
            std::min(listed_rows(view), most_kept_rows(bounds.most_kept, bounds.slots));
        const bool are_few = uint64_t{kept} * view.group <= query_rows;
        bounds.sequences += bounds.items + bounds.rows / kept;
        few += bounds.items + (are_few ? bounds.rows / kept : 0);
    }
    bounds.pieces = bounds.row_pieces = bounds.joined_rows = 0;
    bounds.partials = 0;
    bounds.piece_slots = attend_piece_slots(1);
    const auto leave = [&](uint32_t pieces, uint32_t rows) {
        bounds.partials = std::max(bounds.partials, uint64_t{pieces} * rows);
        if (pieces > 0) bounds.joined_rows = std::max(bounds.joined_rows, rows);
    };
    if (view.group <= query_rows) {
        const uint32_t each = most_few_pieces(bounds.slots);
        bounds.pieces = each * few;
        leave(each + split, std::min(item_rows, query_rows / view.group));
    }
    const uint64_t most_vectors = uint64_t{std::min(item_rows, listed_rows(view))} * view.group;
    if (most_vectors <= query_rows) return;
    uint32_t each = 1;
    for (uint32_t sets = 2; sets <= ceil_divide<uint64_t>(most_vectors, set_vectors); ++sets) {
        if (sets * set_vectors < view.group) continue;  // not a row
        const uint32_t pieces = most_rows_pieces(sets, bounds.slots);
        const uint32_t rows = std::min(item_rows, sets * set_vectors / view.group);
        each = std::max(each, pieces * ceil_divide(sets * set_vectors, tile_vectors));
        leave(pieces + split == 1 ? 0 : pieces + split, rows);
        if (pieces == 1 && sets >= enough_sets) break;
    }
    const uint64_t vectors = uint64_t{bounds.rows} * view.group;
    const uint32_t cut = static_cast<uint32_t>(
        std::min<uint64_t>(bounds.sequences, ceil_divide<uint64_t>(vectors, query_rows + 1)));
    bounds.row_pieces = cut * each + static_cast<uint32_t>(vectors / tile_vectors) + cut;
}

void plan_attention(kvrt_attend_plan& plan) {
    plan.sequence_count = plan.wave_count = 0;
    for (uint32_t kind = 0; kind < 2; ++kind) {
        plan.piece_count[kind] = plan.row_piece_count[kind] = 0;
    }
    plan_maker maker{plan};
    for (uint32_t i = 0; i < plan.item_count; ++i) maker.add(plan.items[i]);
}

bool advance_attention(const kvrt_attend_plan& plan, device_table& table, uint64_t sequences) {
    constexpr uint64_t sequence_words = sizeof(kvrt_attend_sequence) / sizeof(uint32_t);
    if (plan.sequence_count != plan.item_count || plan.wave_count != 1) return false;
    const kvrt_attend_sequence* const before =
        reinterpret_cast<const kvrt_attend_sequence*>(table.words_at(sequences));
    for (uint32_t i = 0; i < plan.item_count; ++i) {
        if (!advances(plan.view, before[i], plan.items[i])) return false;
    }
    for (uint32_t i = 0; i < plan.item_count; ++i) {
        kvrt_attend_sequence made = plan.items[i];
        made.first_partial = before[i].first_partial;
        made.pieces = before[i].pieces;
        made.kept = before[i].kept;
        table.write(sequences + i * sequence_words, reinterpret_cast<const uint32_t*>(&made),
                    sequence_words);
    }
    return true;
}

}  // namespace kvrt::cuda
