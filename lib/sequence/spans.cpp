#include "sequence/spans.hpp"

#include <algorithm>

namespace kvrt {

namespace {

/// Spans cut where guards begin and end: each is held as a whole, or not at all.
struct cut_spans {
    /// Guards are the prompt or sinks, pinned ranges and the newest; each end cuts one span.
    static constexpr uint32_t capacity = position_spans::capacity + 1 + 2 * 18;
    struct piece {
        position_span span;
        bool held = false;
    };
    std::array<piece, capacity> pieces = {};
    uint32_t count = 0;

    void add(const position_span& span, bool held) {
        if (span.first < span.end && span.kept.most != 0) pieces[count++] = {span, held};
    }
    slot_count total(bool held) const {
        slot_count sum;
        for (uint32_t i = 0; i < count; ++i) {
            if (pieces[i].held != held) continue;
            sum.least += pieces[i].span.kept.least;
            sum.most += pieces[i].span.kept.most;
        }
        return sum;
    }
};

/// The part of a span at [first, end).
position_span part_of(const position_span& span, uint64_t first, uint64_t end) {
    position_span part = span;
    part.first = static_cast<uint32_t>(std::clamp<uint64_t>(first, span.first, span.end));
    part.end = static_cast<uint32_t>(std::clamp<uint64_t>(end, part.first, span.end));
    const uint32_t outside = span.width() - part.width();
    part.kept.least -= std::min(part.kept.least, outside);
    part.kept.most = std::min(part.kept.most, part.width());
    return part;
}

cut_spans cut(const retained_spans& retained, const held_range* held, uint32_t held_count) {
    cut_spans made;
    for (uint32_t i = 0; i < retained.count(); ++i) {
        const position_span span = retained.at(i);
        uint64_t next = span.first;
        for (uint32_t h = 0; h < held_count && held[h].first < span.end; ++h) {
            if (held[h].end <= next) continue;
            made.add(part_of(span, next, held[h].first), false);
            made.add(part_of(span, held[h].first, held[h].end), true);
            next = held[h].end;
        }
        made.add(part_of(span, next, span.end), false);
    }
    return made;
}

/// Of the candidates the newest stay, and all numbers are known.
void keep_newest(cut_spans& spans, uint32_t places) {
    for (uint32_t i = spans.count; i-- > 0;) {
        if (spans.pieces[i].held) continue;
        position_span& span = spans.pieces[i].span;
        const uint32_t kept = std::min(places, span.kept.most);
        if (span.full()) span.first = span.end - kept;
        span.kept = {kept, kept};
        places -= kept;
    }
}

/// Whichever stay: one piece may lose all that goes, or have all places.
void keep_any(cut_spans& spans, slot_count places, uint32_t removed) {
    for (uint32_t i = 0; i < spans.count; ++i) {
        if (spans.pieces[i].held) continue;
        slot_count& kept = spans.pieces[i].span.kept;
        kept.least -= std::min(kept.least, removed);
        kept.most = std::min(kept.most, places.most);
    }
}

cut_spans::piece join(const cut_spans::piece& a, const cut_spans::piece& b) {
    return {{a.span.first,
             b.span.end,
             {a.span.kept.least + b.span.kept.least, a.span.kept.most + b.span.kept.most}},
            a.held};
}

/// Neighbours that need not be told apart become one.
void join_neighbours(cut_spans& spans) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < spans.count; ++i) {
        const cut_spans::piece& next = spans.pieces[i];
        if (next.span.kept.most == 0) continue;
        if (count != 0) {
            cut_spans::piece& last = spans.pieces[count - 1];
            const bool in_one =
                last.span.full() && next.span.full() && last.span.end == next.span.first;
            const bool open = !last.held && !next.held && !(last.span.full() && next.span.full());
            if (in_one || open) {
                const bool held = last.held || next.held;
                last = join(last, next);
                last.held = held;
                continue;
            }
        }
        spans.pieces[count++] = next;
    }
    spans.count = count;
}

/// Where only one piece is no guard's, the others say how much it has.
void settle_last(cut_spans& spans, slot_count places) {
    cut_spans::piece* only = nullptr;
    for (uint32_t i = 0; i < spans.count; ++i) {
        if (spans.pieces[i].held) continue;
        if (only != nullptr) return;
        only = &spans.pieces[i];
    }
    if (only == nullptr || only->span.full()) return;
    slot_count& kept = only->span.kept;
    kept = {std::max(kept.least, places.least), std::min(kept.most, places.most)};
}

/// Fewer pieces, of which less is known: those that are closest together join.
void squeeze(cut_spans& spans) {
    while (spans.count > position_spans::capacity) {
        uint32_t chosen = 0;
        for (uint32_t i = 0; i + 1 < spans.count; ++i) {
            const auto width = [&](uint32_t at) {
                return spans.pieces[at + 1].span.end - spans.pieces[at].span.first;
            };
            if (width(i) < width(chosen)) chosen = i;
        }
        spans.pieces[chosen] = join(spans.pieces[chosen], spans.pieces[chosen + 1]);
        std::copy(spans.pieces.begin() + chosen + 2, spans.pieces.begin() + spans.count,
                  spans.pieces.begin() + chosen + 1);
        --spans.count;
    }
}

}  // namespace

uint32_t retained_spans::count() const {
    const uint32_t before = explicit_slots != 0 ? placed.count : 0;
    return before + (slots != explicit_slots ? 1 : 0);
}

position_span retained_spans::at(uint32_t index) const {
    if (explicit_slots != 0 && index < placed.count) return placed.span[index];
    const uint32_t tail = slots - explicit_slots;
    return {
        static_cast<uint32_t>(tail_first()), static_cast<uint32_t>(next_position), {tail, tail}};
}

slot_count count_between(const retained_spans& retained, uint64_t first, uint64_t end) {
    slot_count sum;
    for (uint32_t i = 0; i < retained.count(); ++i) {
        const position_span span = retained.at(i);
        if (span.end <= first || end <= span.first) continue;
        const slot_count part = part_of(span, first, end).kept;
        sum.least += part.least;
        sum.most += part.most;
    }
    return sum;
}

uint64_t newest_from(const retained_spans& retained, uint32_t count) {
    uint64_t from = retained.next_position;
    for (uint32_t i = retained.count(); i-- > 0;) {
        const position_span span = retained.at(i);
        if (span.kept.most > count) return span.full() ? span.end - count : from;
        count -= span.kept.most;
        from = span.first;
    }
    return from;
}

bool list_known_positions(const retained_spans& retained, uint64_t capacity, uint32_t* positions) {
    for (uint32_t i = 0; i < retained.count(); ++i) {
        if (!retained.at(i).full()) return false;
    }
    uint64_t written = 0;
    for (uint32_t i = 0; i < retained.count(); ++i) {
        const position_span span = retained.at(i);
        for (uint32_t position = span.first; position < span.end && written < capacity;) {
            positions[written++] = position++;
        }
    }
    return true;
}

bool surely_same(const retained_spans& a, const retained_spans& b, bool by_head) {
    if (a.slots != b.slots || a.next_position != b.next_position) return false;
    const bool placed = a.explicit_slots != 0 && b.explicit_slots != 0;
    const bool covers = by_head || !a.placed.by_head;
    if (placed && covers && a.placed.set != 0 && a.placed.set == b.placed.set) return true;
    // Else where positions are known: full spans, and neither's cut elsewhere.
    if (!list_known_positions(a, 0, nullptr) || !list_known_positions(b, 0, nullptr)) return false;
    uint32_t i = 0, j = 0;
    uint64_t first_a = 0, first_b = 0;
    while (i < a.count() && j < b.count()) {
        const position_span in_a = a.at(i), in_b = b.at(j);
        first_a = std::max<uint64_t>(first_a, in_a.first);
        first_b = std::max<uint64_t>(first_b, in_b.first);
        if (first_a != first_b) return false;
        first_a = first_b = std::min(in_a.end, in_b.end);
        if (first_a == in_a.end) ++i;
        if (first_b == in_b.end) ++j;
    }
    return i == a.count() && j == b.count();
}

position_spans spans_after_round(const retained_spans& before, const held_range* held,
                                 uint32_t held_count, uint32_t keep, bool keeps_newest) {
    cut_spans spans = cut(before, held, held_count);
    const slot_count protected_slots = spans.total(true), candidates = spans.total(false);
    const slot_count places = {keep - std::min(keep, protected_slots.most),
                               keep - std::min(keep, protected_slots.least)};
    bool all_known = places.exact();
    for (uint32_t i = 0; i < spans.count; ++i) {
        all_known = all_known && spans.pieces[i].span.kept.exact();
    }
    if (keeps_newest && all_known) {
        keep_newest(spans, std::min(places.most, candidates.most));
        join_neighbours(spans);
    } else {
        keep_any(spans, places, before.slots - std::min(keep, before.slots));
        join_neighbours(spans);
        settle_last(spans, places);
    }
    squeeze(spans);
    position_spans after;
    after.count = spans.count;
    for (uint32_t i = 0; i < spans.count; ++i) after.span[i] = spans.pieces[i].span;
    return after;
}

}  // namespace kvrt
