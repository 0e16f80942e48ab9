// Extremes of the channels of some slots, compiled once per instruction set. NaN is left out.

// Per-target include guard.
#if defined(KVRT_RETENTION_EXTREMES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_RETENTION_EXTREMES_INL_HPP
#undef KVRT_RETENTION_EXTREMES_INL_HPP
#else
#define KVRT_RETENTION_EXTREMES_INL_HPP
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// Parts start anywhere in a group of 16 slots: its other lanes are not the part's.
struct part_slots {
    uint32_t first;
    uint32_t end;

    uint32_t first_group() const { return first / slot_group * slot_group; }
    bool holds_group(uint32_t slot) const { return slot >= first && slot + slot_group <= end; }
    HWY_INLINE auto lanes(uint32_t slot) const {
        const float_tag d;
        const auto before = hn::FirstN(d, first > slot ? HWY_MIN(first - slot, vector_slots) : 0);
        const auto behind = hn::FirstN(d, end > slot ? HWY_MIN(end - slot, vector_slots) : 0);
        return hn::AndNot(before, behind);
    }
};

// Elements of two bytes are compared as integers that order as they do, with NaN beyond infinity.
using word_tag = hn::CappedTag<int16_t, 2 * slot_group>;
using words = hn::Vec<word_tag>;
constexpr uint32_t vector_words = static_cast<uint32_t>(hn::MaxLanes(word_tag()));

HWY_INLINE words order_of(words bits) {
    return hn::Xor(bits, hn::And(hn::ShiftRight<15>(bits), hn::Set(word_tag(), 0x7fff)));
}
HWY_INLINE words load_order(const std::byte* from) {
    return order_of(hn::LoadU(word_tag(), reinterpret_cast<const int16_t*>(from)));
}
/// The way back is the same.
HWY_INLINE void put_order(words order, int16_t* to) { hn::Store(order_of(order), word_tag(), to); }

// Of the channels so far; arrays hold whole vectors. Those of groups in rows are kept by channel,
// those of tiles by channel and slot of the group; elements of two bytes apart, until another type
// comes or all are joined.
struct channel_extremes {
    alignas(64) float least[widest_row + 2 * slot_group];
    alignas(64) float greatest[widest_row + 2 * slot_group];
    // Side by side: apart they would share their places in a page, and stores would hold up loads.
    alignas(64) float by_slot[2 * widest_row * slot_group];          // [dim][least, greatest][16]
    alignas(64) int16_t words_by_slot[2 * widest_row * slot_group];  // [dim / 2][the same][2][16]
    alignas(64) int16_t least_words[widest_row + 2 * slot_group];
    alignas(64) int16_t greatest_words[widest_row + 2 * slot_group];
    uint32_t dim;
    bool has_slots = false;
    bool has_words = false, has_words_by_slot = false;
    bool holds_nan = false;  // among elements of two bytes: what was found is of no use
    element word_type = element::f16;

    explicit channel_extremes(uint32_t channels) : dim(channels) {
        std::fill_n(least, dim, std::numeric_limits<float>::infinity());
        std::fill_n(greatest, dim, -std::numeric_limits<float>::infinity());
    }
    void begin_slots() {
        constexpr float infinity = std::numeric_limits<float>::infinity();
        for (uint32_t i = 0; !has_slots && i < dim; ++i) {
            std::fill_n(by_slot + 2 * i * slot_group, slot_group, infinity);
            std::fill_n(by_slot + (2 * i + 1) * slot_group, slot_group, -infinity);
        }
        has_slots = true;
    }
    template <element type>
    void begin_words() {
        if (has_words && word_type == type) return;
        join_words();
        std::fill_n(least_words, dim, most);
        std::fill_n(greatest_words, dim, fewest);
        has_words = true;
        word_type = type;
    }
    template <element type>
    void begin_words_by_slot() {
        begin_words<type>();
        for (uint32_t i = 0; !has_words_by_slot && i < dim; i += 2) {
            std::fill_n(words_by_slot + 2 * i * slot_group, 2 * slot_group, most);
            std::fill_n(words_by_slot + 2 * (i + 1) * slot_group, 2 * slot_group, fewest);
        }
        has_words_by_slot = true;
    }
    void join() {
        const float_tag d;
        join_words();
        for (uint32_t i = 0; has_slots && i < dim; ++i) {
            const float* low = by_slot + 2 * i * slot_group;
            const float* high = low + slot_group;
            floats lows = hn::Load(d, low), highs = hn::Load(d, high);
            for (uint32_t first = vector_slots; first < slot_group; first += vector_slots) {
                lows = hn::Min(lows, hn::Load(d, low + first));
                highs = hn::Max(highs, hn::Load(d, high + first));
            }
            widen(i, hn::GetLane(hn::MinOfLanes(d, lows)), hn::GetLane(hn::MaxOfLanes(d, highs)));
        }
    }

  private:
    static constexpr int16_t most = std::numeric_limits<int16_t>::max();
    static constexpr int16_t fewest = std::numeric_limits<int16_t>::min();

    void widen(uint32_t i, float low, float high) {
        least[i] = HWY_MIN(least[i], low);
        greatest[i] = HWY_MAX(greatest[i], high);
    }
    template <element type>
    void widen_by_words() {
        const word_tag dw;
        const float_tag d;
        for (uint32_t i = 0; i < dim; i += vector_words) {
            put_order(hn::Load(dw, least_words + i), least_words + i);
            put_order(hn::Load(dw, greatest_words + i), greatest_words + i);
        }
        for (uint32_t i = 0; i < dim; i += vector_slots) {
            const floats low =
                load_f32<type>(d, reinterpret_cast<const std::byte*>(least_words + i));
            const floats high =
                load_f32<type>(d, reinterpret_cast<const std::byte*>(greatest_words + i));
            const auto mine = hn::FirstN(d, dim - i);  // NaN lies beyond all numbers
            const auto odd = hn::Or(hn::IsNaN(low), hn::IsNaN(high));
            holds_nan = holds_nan || !hn::AllFalse(d, hn::And(mine, odd));
            hn::Store(hn::Min(hn::Load(d, least + i), low), d, least + i);
            hn::Store(hn::Max(hn::Load(d, greatest + i), high), d, greatest + i);
        }
    }
    // Of 16 channels from `first` on, their slots side by side, which are turned around.
    template <bool highest>
    HWY_INLINE void join_slots(uint32_t first, int16_t* joined) {
        const hn::CappedTag<int16_t, slot_group> d;
        alignas(64) uint16_t turned[slot_group * slot_group];
        const uint16_t* of_channel[slot_group];
        for (uint32_t k = 0; k < slot_group; ++k) {
            const uint32_t i = HWY_MIN(first + k, dim - 1), pair = i / 2;
            of_channel[k] = reinterpret_cast<const uint16_t*>(
                words_by_slot + (4 * pair + (highest ? 2 : 0) + i % 2) * slot_group);
        }
        transpose_rows(of_channel, slot_group, turned);
        for (uint32_t k = 0; k < slot_group; k += static_cast<uint32_t>(hn::Lanes(d))) {
            auto found = hn::Load(d, joined + k);
            for (uint32_t slot = 0; slot < slot_group; ++slot) {
                const auto at =
                    hn::Load(d, reinterpret_cast<const int16_t*>(turned) + slot * slot_group + k);
                found = highest ? hn::Max(found, at) : hn::Min(found, at);
            }
            hn::Store(found, d, joined + k);
        }
    }
    void join_words() {
        if (!has_words) return;
        for (uint32_t i = 0; has_words_by_slot && i < dim; i += slot_group) {
            join_slots<false>(i, least_words + i);
            join_slots<true>(i, greatest_words + i);
        }
        if (word_type == element::f16) {
            widen_by_words<element::f16>();
        } else {
            widen_by_words<element::bf16>();
        }
        has_words = false;
        has_words_by_slot = false;
    }
};

struct extremes_kernel {
    uint32_t dim;
    part_slots part;
    channel_extremes& extremes;

    static constexpr bool takes_rows = true;

    template <element type>
    void rows(const row_group<type>& group, uint32_t slot, uint32_t, tile_prefetch coming) const {
        const uint32_t first = HWY_MAX(part.first, slot) - slot;
        const uint32_t end = HWY_MIN(part.end - slot, slot_group);
        if constexpr (type == element::f32) {
            const float_tag d;
            take_rows(d, extremes.least, extremes.greatest, first, end, coming,
                      [&](uint32_t row, uint32_t i) HWY_ATTR { return group.load(row, i); });
        } else {
            extremes.begin_words<type>();
            const word_tag d;
            take_rows(d, extremes.least_words, extremes.greatest_words, first, end, coming,
                      [&](uint32_t row, uint32_t i) HWY_ATTR {
                          return load_order(group.first + row * group.stride + i * sizeof(int16_t));
                      });
        }
    }

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t, tile_prefetch coming) const {
        if constexpr (type == element::f32) {
            extremes.begin_slots();
        } else {
            extremes.begin_words_by_slot<type>();
        }
        if (part.holds_group(slot)) {
            take<type, true>(tile, slot, coming);
        } else {
            take<type, false>(tile, slot, coming);
        }
    }

  private:
    template <class tag, class number, class callable>
    HWY_INLINE void take_rows(tag d, number* least, number* greatest, uint32_t first, uint32_t end,
                              tile_prefetch& coming, const callable& load) const {
        constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(tag()));
        for (uint32_t i = 0; i < dim; i += lanes) {
            auto low = hn::Load(d, least + i), high = hn::Load(d, greatest + i);
            for (uint32_t row = first; row < end; ++row) {
                coming.advance(lanes * sizeof(number));
                const auto x = load(row, i);
                if constexpr (std::is_same_v<number, float>) {
                    low = hn::IfThenElse(hn::Lt(x, low), x, low);
                    high = hn::IfThenElse(hn::Lt(high, x), x, high);
                } else {
                    low = hn::Min(low, x);
                    high = hn::Max(high, x);
                }
            }
            hn::Store(low, d, least + i);
            hn::Store(high, d, greatest + i);
        }
    }

    template <element type, bool whole>
    HWY_INLINE void take(const std::byte* tile, uint32_t slot, tile_prefetch& coming) const {
        if constexpr (type == element::f32) {
            take_floats<type, whole>(tile, slot, coming);
        } else {
            take_words<whole>(tile, slot, coming);
        }
    }

    template <bool whole>
    HWY_INLINE void take_words(const std::byte* tile, uint32_t slot, tile_prefetch& coming) const {
        const word_tag d;
        alignas(64) int16_t mine[2 * slot_group];  // all bits of the lanes that are the part's
        for (uint32_t i = 0; !whole && i < 2 * slot_group; ++i) {
            const uint32_t at = slot + i % slot_group;
            mine[i] = at >= part.first && at < part.end ? -1 : 0;
        }
        for (uint32_t i = 0; i < dim; i += 2) {
            coming.advance(2 * slot_group * sizeof(int16_t));
            for (uint32_t first = 0; first < 2 * slot_group; first += vector_words) {
                const words x = load_order(tile + (i * slot_group + first) * sizeof(int16_t));
                int16_t* low = extremes.words_by_slot + 2 * i * slot_group + first;
                int16_t* high = low + 2 * slot_group;
                words not_above = x, not_below = x;
                if constexpr (!whole) {
                    const auto wanted = hn::Ne(hn::Load(d, mine + first), hn::Zero(d));
                    not_above = hn::IfThenElse(wanted, x, hn::Set(d, 0x7fff));
                    not_below = hn::IfThenElse(wanted, x, hn::Set(d, -0x8000));
                }
                hn::Store(hn::Min(hn::Load(d, low), not_above), d, low);
                hn::Store(hn::Max(hn::Load(d, high), not_below), d, high);
            }
        }
    }

  public:
    template <element type, bool whole>
    HWY_INLINE void take_floats(const std::byte* tile, uint32_t slot, tile_prefetch& coming) const {
        const float_tag d;
        const floats endless = hn::Set(d, std::numeric_limits<float>::infinity());
        for (uint32_t first = 0; first < slot_group; first += vector_slots) {
            const auto mine = part.lanes(slot + first);
            for (uint32_t i = 0; i < dim; ++i) {
                if (first == 0) coming.advance(slot_group * element_bytes(type));
                const floats x = load_lanes<type>(tile, i, first);
                float* low = extremes.by_slot + 2 * i * slot_group + first;
                float* high = low + slot_group;
                const floats not_above = whole ? x : hn::IfThenElse(mine, x, endless);
                const floats not_below = whole ? x : hn::IfThenElse(mine, x, hn::Neg(endless));
                const floats lowest = hn::Load(d, low), highest = hn::Load(d, high);
                const auto below = hn::Lt(not_above, lowest), above = hn::Lt(highest, not_below);
                hn::Store(hn::IfThenElse(below, not_above, lowest), d, low);
                hn::Store(hn::IfThenElse(above, not_below, highest), d, high);
            }
        }
    }
};

// Of slots that hold NaN, whatever their elements.
struct number_extremes_kernel {
    const extremes_kernel& all;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t, tile_prefetch coming) const {
        all.extremes.begin_slots();
        all.template take_floats<type, false>(tile, slot, coming);
    }
};

// Those of a part, of which nothing may have been found yet.
HWY_NOINLINE void find_among_numbers(operand_role role, const stored_rows& rows,
                                     const part_slots& part, channel_extremes& extremes) {
    const extremes_kernel all{extremes.dim, part, extremes};
    visit_tiles(role, rows, part.first_group(), part.end, number_extremes_kernel{all});
    extremes.join();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
