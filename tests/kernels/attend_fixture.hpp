// What tests of attention kernels share: sequences in a lane of the emulated device, written by the
// library, and the library's reference in double to compare with. The arena is full of NaNs where
// nothing was written, and slots that no row sees hold NaNs, too.
#pragma once

#include <cmath>
#include <limits>
#include <memory>

#include "attention/attend.hpp"
#include "base/executor.hpp"
#include "format/retile.hpp"
#include "kernels/attend.hpp"
#include "kernels/attend_codes.hpp"
#include "kernels/attend_opened.hpp"
#include "lane_fixture.hpp"

namespace kernel_test {

struct attend_case {
    lane_description lane;
    number query, out;
    uint32_t query_heads = 4;
    uint32_t window = 0, window_sinks = 0;
    float softcap = 0.0f;
    bool sinks = false, slopes = false;
    uint32_t spoiled_slots = 0;  ///< values of the last slots have a NaN each
    uint32_t turned_pairs = 0;   ///< by slots
    bool interleaved = false;
    /// Full blocks hold the same rows in these formats, where there are any.
    uint32_t sealed_keys = 0, sealed_values = 0;
    uint32_t kept_rows = 0;  ///< weights of so many rows of each sequence are kept, the last ones

    bool seals() const { return sealed_keys != 0; }
};

struct sequence_shape {
    uint32_t slots;
    uint32_t rows = 1;  ///< the last of them are attended from
};

class attend_fixture {
  public:
    attend_fixture(const attend_case& what, const std::vector<sequence_shape>& shapes,
                   size_t partials)
        : test(what),
          sequences(shapes),
          lane_(what.lane, count(), blocks_each()),
          queries_(what.query, all_rows(), what.query_heads, what.lane.key_dim, 8),
          out_(what.out, all_rows(), what.query_heads, what.lane.value_dim),
          largest_(partials * what.query_heads),
          sum_(partials * what.query_heads),
          values_(partials * what.query_heads * what.lane.value_dim),
          log_sums_(size_t{all_rows()} * what.query_heads),
          head_values_(2 * what.query_heads),
          kept_weights_(size_t{16} * kept_before(count()) * what.query_heads),
          kept_largest_(size_t{kept_before(count())} * what.query_heads),
          positions_(position_count()),
          frequencies_(what.turned_pairs),
          turning_table_(kvrt::turning_table_floats(what.turned_pairs)),
          on_turning_(turning_table_.size()) {
        for (uint32_t b = 0; b < what.turned_pairs; ++b) {
            frequencies_[b] = std::pow(10000.0, -static_cast<double>(b) / what.turned_pairs);
        }
        kvrt::fill_turning_table(frequencies_.data(), what.turned_pairs, turning_table_.data());
        std::copy(turning_table_.begin(), turning_table_.end(), on_turning_.begin());
        turning_ = {what.turned_pairs, what.interleaved, 1.125f, turning_table_.data(),
                    frequencies_.data()};
        for (std::byte& each : lane_.arena) each = std::byte{0xff};
        if (what.seals()) describe_sealed();
        for (uint32_t s = 0; s < count(); ++s) {
            device_tensor keys(number::f32, shapes[s].slots, what.lane.kv_heads, what.lane.key_dim);
            device_tensor values(number::f32, shapes[s].slots, what.lane.kv_heads,
                                 what.lane.value_dim);
            keys.fill(100 + s);
            values.fill(200 + s);
            write(s, keys, values);
        }
        queries_.fill(21);
        for (uint32_t head = 0; head < what.query_heads; ++head) {
            head_values_[head] = 0.5f - 0.25f * static_cast<float>(head % 5);
            head_values_[what.query_heads + head] = 0.125f / static_cast<float>(head + 1);
        }
    }

    /// All slots of a sequence, but for those that hold NaNs.
    void write(uint32_t s, device_tensor& keys, device_tensor& values) {
        const uint32_t slots = sequences[s].slots, tokens = test.lane.block_tokens;
        const uint32_t unseen = static_cast<uint32_t>(std::max(window_first(s), 0));
        // In a tile they would spoil others.
        for (uint32_t slot = test.window_sinks; slot < unseen && !test.seals(); ++slot) {
            keys.put(slot, 0, 1, std::nanf(""));
            values.put(slot, 0, 1, std::nanf(""));
        }
        for (uint32_t i = 0; i < std::min(test.spoiled_slots, slots); ++i) {
            values.put(slots - 1 - i, 0, 3, std::nanf(""));
        }
        const kvrt::write_item item{lane_.table_of(s), 0, 0, slots, 0};
        kvrt::executor threads;
        kvrt::write_rows(lane_.layout, lane_.arena.data(), &item, 1, keys.view(), values.view(), {},
                         threads);
        for (uint32_t b = 0; b < sealed_blocks(s); ++b) seal(lane_.table_of(s)[b]);
        kvrt::position_store store = positions();
        for (uint32_t slot = 0; slot < explicit_slots(s); ++slot) {
            for (uint32_t head = 0; head < test.lane.kv_heads; ++head) {
                store.of(lane_.table_of(s)[slot / tokens], head)[slot % tokens] = 2 * slot;
            }
        }
    }

    /// Everything but the lists of what is to be done.
    void describe(kvrt::kernels::attend_parameters& call) {
        call.arena = lane_.arena.data();
        call.place = lane_.place;
        call.tables = lane_.device_tables();
        call.positions = kvrt::kernels::describe(positions(), positions_.data());
        call.queries = queries_.place;
        call.out = out_.place;
        call.query_type = test.query;
        call.out_type = test.out;
        call.partials = {largest_.data(), sum_.data(), values_.data()};
        if (test.kept_rows != 0) call.kept = {kept_weights_.data(), kept_largest_.data()};
        call.log_sum_exp = log_sums_.data();
        call.query_heads = call.row_heads = test.query_heads;
        call.scale = scale();
        call.softcap = test.softcap;
        if (test.sinks) call.sink_logits = head_values_.data();
        if (test.slopes) call.alibi_slopes = head_values_.data() + test.query_heads;
        call.window = test.window != 0;
        call.window_sinks = test.window_sinks;
        if (test.turned_pairs != 0) {
            call.turning = {turning_.pairs, turning_.interleaved, turning_.gain,
                            on_turning_.data()};
        }
        for (const sequence_shape& each : sequences) {
            call.most_rows = std::max(call.most_rows, each.rows);
        }
    }

    kvrt::kernels::attend_sequence sequence(uint32_t s, uint32_t first_partial,
                                            uint32_t pieces) const {
        return {s,
                first_row(s),
                sequences[s].rows,
                sequences[s].slots,
                explicit_slots(s),
                next_position(s),
                window_first(s),
                first_partial,
                pieces,
                0,
                kept_before(s),
                kept_rows(s)};
    }
    uint32_t kept_rows(uint32_t s) const { return std::min(test.kept_rows, sequences[s].rows); }
    /// Entries of all query heads that the sequences before keep.
    uint32_t kept_before(uint32_t s) const {
        uint32_t entries = 0;
        for (uint32_t i = 0; i < s; ++i) {
            entries += kept_rows(i) * ((sequences[i].slots + 15) / 16 + 1);
        }
        return entries;
    }

    const kvrt::kernels::block_place& sealed_place() const { return sealed_place_; }
    uint32_t sealed_blocks(uint32_t s) const {
        return test.seals() ? sequences[s].slots / test.lane.block_tokens : 0;
    }
    uint32_t sealed_slots(uint32_t s) const { return sealed_blocks(s) * test.lane.block_tokens; }

    uint32_t count() const { return static_cast<uint32_t>(sequences.size()); }
    uint32_t first_row(uint32_t s) const {
        uint32_t rows = 0;
        for (uint32_t i = 0; i < s; ++i) rows += sequences[i].rows;
        return rows;
    }
    /// Slots whose positions are stored, which are twice as far apart.
    uint32_t explicit_slots(uint32_t s) const { return test.slopes ? sequences[s].slots / 2 : 0; }
    uint32_t next_position(uint32_t s) const { return sequences[s].slots + explicit_slots(s) + 3; }
    /// Of the first row; may be negative. 0 where there is no window.
    int32_t window_first(uint32_t s) const {
        if (test.window == 0) return 0;
        return static_cast<int32_t>(sequences[s].slots + 1 - sequences[s].rows) -
               static_cast<int32_t>(test.window);
    }

    device_tensor& queries() { return queries_; }
    const device_tensor& out() const { return out_; }
    std::vector<float> row(uint32_t index) const {
        std::vector<float> numbers;
        for (uint32_t head = 0; head < test.query_heads; ++head) {
            for (uint32_t i = 0; i < out_.dim; ++i) numbers.push_back(out_.get(index, head, i));
        }
        return numbers;
    }
    /// As if nothing had been computed yet.
    void forget() {
        for (std::byte& each : out_.bytes) each = std::byte{0xee};
        for (float& each : log_sums_) each = std::nanf("");
        for (uint16_t& each : kept_weights_) each = 0x7e00;
        for (float& each : kept_largest_) each = std::nanf("");
        for (float& each : largest_) each = std::nanf("");
        for (float& each : sum_) each = std::nanf("");
        for (float& each : values_) each = std::nanf("");
    }

    /// Against the reference: the largest error, in units of the largest value. Where one of both
    /// is NaN it is infinite.
    double error() const {
        const uint32_t dim = test.lane.value_dim;
        std::vector<float> expected(size_t{all_rows()} * test.query_heads * dim);
        std::vector<float> expected_log_sums(size_t{all_rows()} * test.query_heads);
        refer(expected, expected_log_sums);
        double largest = 0.0, worst = 0.0;
        for (uint32_t row = 0; row < all_rows(); ++row) {
            for (uint32_t head = 0; head < test.query_heads; ++head) {
                const size_t at = size_t{row} * test.query_heads + head;
                const double log_sum_error =
                    std::abs(double{log_sums_[at]} - double{expected_log_sums[at]});
                if (!(log_sum_error < 0.02)) return std::numeric_limits<double>::infinity();
                for (uint32_t i = 0; i < dim; ++i) {
                    const double right = expected[at * dim + i], got = out_.get(row, head, i);
                    if (std::isnan(right) && std::isnan(got)) continue;
                    const double difference = std::abs(got - right);
                    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
                    worst = std::max(worst, difference);
                    largest = std::max(largest, std::abs(right));
                }
            }
        }
        return worst / largest;
    }

    /// Kept weights against softmaxes in double: the largest error. Of f16 keys, with soft-caps and
    /// sinks.
    double kept_error() const {
        double worst = 0.0;
        for (uint32_t s = 0; s < count(); ++s) {
            const sequence_shape& shape = sequences[s];
            device_tensor keys(number::f32, shape.slots, test.lane.kv_heads, test.lane.key_dim);
            keys.fill(100 + s);
            for (uint32_t row = shape.rows - kept_rows(s); row < shape.rows; ++row) {
                for (uint32_t head = 0; head < test.query_heads; ++head) {
                    worst = std::max(worst, kept_error(s, keys, row, head));
                }
            }
        }
        return worst;
    }

    const attend_case test;
    const std::vector<sequence_shape> sequences;

  private:
    double kept_error(uint32_t s, const device_tensor& keys, uint32_t row, uint32_t head) const {
        const sequence_shape& shape = sequences[s];
        const uint32_t seen = shape.slots - (shape.rows - 1 - row);
        const uint32_t kv_head = head / (test.query_heads / test.lane.kv_heads);
        std::vector<double> weights(seen);
        double total = test.sinks ? std::exp(double{head_values_[head]}) : 0.0;
        for (uint32_t slot = 0; slot < seen; ++slot) {
            double product = 0.0;
            for (uint32_t i = 0; i < test.lane.key_dim; ++i) {
                const float key = kvrt::f16_to_f32(
                    kvrt::f32_to_f16(static_cast<float>(keys.get(slot, kv_head, i))));
                product += double{queries_.get(first_row(s) + row, head, i)} * double{key};
            }
            double logit = double{scale()} * product;
            if (test.softcap != 0.0f) {
                logit = double{test.softcap} * std::tanh(logit / double{test.softcap});
            }
            weights[slot] = std::exp(logit);
            total += weights[slot];
        }
        const uint64_t rows = kept_rows(s), place = row - (shape.rows - rows);
        const auto entry = [&](uint32_t group) {
            return (kept_before(s) + group * rows + place) * test.query_heads + head;
        };
        const double log_sum = double{kept_largest_[entry((shape.slots + 15) / 16)]};
        double worst = 0.0;
        for (uint32_t slot = 0; slot < seen; ++slot) {
            const uint64_t at = entry(slot / 16);
            const double kept = double{kvrt::f16_to_f32(kept_weights_[at * 16 + slot % 16])};
            const double factor = std::exp(double{kept_largest_[at]} * std::log(2.0) - log_sum);
            const double error = std::abs(kept * factor - weights[slot] / total);
            if (!(error <= worst)) worst = error;  // NaN stays
        }
        return worst;
    }

    uint32_t all_rows() const { return first_row(count()); }
    uint32_t blocks_each() const {
        uint32_t most = 0;
        for (const sequence_shape& each : sequences) most = std::max(most, each.slots);
        return most / test.lane.block_tokens + 1;
    }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(test.lane.key_dim)); }
    kvrt::block_numbering numbering() const {
        return kvrt::block_numbering(lane_.layout.block_bytes / kvrt::block_unit);
    }
    size_t position_count() const {
        const uint32_t most = *std::max_element(lane_.ids.begin(), lane_.ids.end());
        return (numbering().index(most) + 1) * test.lane.kv_heads * test.lane.block_tokens;
    }
    kvrt::position_store positions() const {
        return {const_cast<uint32_t*>(positions_.data()), numbering(),
                test.lane.kv_heads * test.lane.block_tokens, test.lane.block_tokens};
    }

    void describe_sealed() {
        sealed_ = kvrt::make_tile_layout(
            test.lane.order, test.lane.block_tokens, test.lane.kv_heads, test.lane.key_dim,
            test.lane.value_dim, *kvrt::find_format(test.sealed_keys, kvrt::operand_role::keys),
            *kvrt::find_format(test.sealed_values, kvrt::operand_role::values));
        sealed_.keys.share_constants(lane_.layout.keys);
        sealed_.values.share_constants(lane_.layout.values);
        REQUIRE(kvrt::kernels::describe(sealed_, sealed_place_));
        REQUIRE(sealed_.block_bytes <= lane_.layout.block_bytes);
        sealed_place_.keys.scales = sealed_place_.values.scales = lane_.place.keys.scales;
    }
    /// A block's rows in the other layout, in its place.
    void seal(uint32_t id) {
        const uint32_t bytes = lane_.layout.block_bytes;
        std::vector<std::byte> both(2 * size_t{bytes});
        std::byte* const block = lane_.arena.data() + size_t{id} * kvrt::block_unit;
        std::copy(block, block + bytes, both.begin());
        const uint32_t first = 0, target = bytes / kvrt::block_unit;
        const kvrt::block_run from{&lane_.layout, &sealed_, &first, 0};
        kvrt::recoding recoded;
        for (uint32_t head = 0; head < test.lane.kv_heads; ++head) {
            kvrt::fill_block(from, both.data(), nullptr, 0, test.lane.block_tokens, head, sealed_,
                             target, 0, recoded);
        }
        std::copy(both.begin() + bytes, both.end(), block);
    }

    void refer(std::vector<float>& expected, std::vector<float>& log_sums) const {
        kvrt::attend_layer layer;
        layer.layout = lane_.layout;
        if (test.seals()) layer.sealed_layout = sealed_;
        layer.query_heads = test.query_heads;
        layer.kv_heads = test.lane.kv_heads;
        layer.scale = scale();
        layer.softcap = test.softcap;
        if (test.sinks) layer.sink_logits = head_values_.data();
        if (test.slopes) layer.alibi_slopes = head_values_.data() + test.query_heads;
        layer.window = test.window;
        layer.window_sinks = test.window_sinks;
        if (test.turned_pairs != 0) layer.slot_turning = &turning_;
        std::vector<kvrt::attend_item> items(count());
        for (uint32_t s = 0; s < count(); ++s) {
            items[s].blocks = lane_.table_of(s);
            items[s].first_row = first_row(s);
            items[s].rows = sequences[s].rows;
            items[s].slots = sequences[s].slots;
            items[s].explicit_slots = explicit_slots(s);
            items[s].sealed_blocks = sealed_blocks(s);
            items[s].window_first = window_first(s);
            items[s].next_position = next_position(s);
        }
        kvrt::attend_call reference;
        reference.layer = &layer;
        reference.arena = lane_.arena.data();
        reference.positions = reference.sealed_positions = positions();
        reference.items = items.data();
        reference.item_count = count();
        reference.queries = queries_.view();
        reference.out.data = reinterpret_cast<std::byte*>(expected.data());
        reference.out.type = kvrt::element::f32;
        reference.out.head_stride = test.lane.value_dim;
        reference.out.row_stride = int64_t{test.query_heads} * test.lane.value_dim;
        reference.log_sum_exp = log_sums.data();
        kvrt::attend_reference(reference);
    }

    lane lane_;
    kvrt::tile_layout sealed_;
    kvrt::kernels::block_place sealed_place_;
    device_tensor queries_, out_;
    device_array<float> largest_, sum_, values_, log_sums_, head_values_;
    device_array<uint16_t> kept_weights_;
    device_array<float> kept_largest_;
    device_array<uint32_t> positions_;
    std::vector<double> frequencies_;
    std::vector<float> turning_table_;
    device_array<float> on_turning_;
    kvrt::position_rotation turning_;
};

// Values, weights and results are rounded to 11 and 8 bits; of many errors most cancel, of few two
// roundings of the largest result may be left.
constexpr double f16_bound = 2.0 / 2048, bf16_bound = 1.0 / 256;

template <number type, uint32_t channels>
using half = kvrt::kernels::half_tiles<context, type, channels>;
template <uint32_t channels>
using bytes = kvrt::kernels::code_tiles<context, false, false, channels>;
template <uint32_t channels>
using nibbles = kvrt::kernels::code_tiles<context, true, true, channels>;
using bytes_nibbles = kvrt::kernels::code_tiles<context, false, true, 128>;
template <uint32_t channels>
using opened = kvrt::kernels::opened_tiles<context, channels>;

}  // namespace kernel_test
