// Decode attention, pieces and their join, against the library's reference in double. The arena is
// full of NaNs where nothing was written, and slots that are not seen hold NaNs, too.
#include "attention/attend.hpp"

#include <cmath>
#include <limits>

#include "base/executor.hpp"
#include "format/small_float.hpp"
#include "kernels/attend_codes.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct attend_case {
    lane_description lane;
    number query, out;
    uint32_t query_heads = 4;
    uint32_t window = 0, window_sinks = 0;
    float softcap = 0.0f;
    bool sinks = false, slopes = false;
    uint32_t rows = 1;  ///< of a sequence that has as many slots
};

constexpr uint32_t blocks_each = 34;
constexpr uint32_t most_pieces = 3;

/// Lengths of the sequences: one slot, ends of groups and beside them, several pieces.
std::vector<uint32_t> lengths() {
    if (few_cases) return {33};
    return {1, 16, 37, 530};
}

class attention_on_device {
  public:
    explicit attention_on_device(const attend_case& test)
        : test_(test),
          slots_(lengths()),
          sequences_(static_cast<uint32_t>(slots_.size())),
          all_rows_(sequences_ * test.rows),
          lane_(test.lane, sequences_, blocks_each),
          queries_(test.query, all_rows_, test.query_heads, test.lane.key_dim, 8),
          out_(test.out, all_rows_, test.query_heads, test.lane.value_dim),
          largest_(partials() * test.query_heads),
          sum_(partials() * test.query_heads),
          values_(partials() * test.query_heads * test.lane.value_dim),
          log_sums_(size_t{all_rows_} * test.query_heads),
          head_values_(2 * test.query_heads),
          positions_(position_count()) {
        for (std::byte& each : lane_.arena) each = std::byte{0xff};
        write();
        queries_.fill(21);
        for (uint32_t head = 0; head < test.query_heads; ++head) {
            head_values_[head] = 0.5f - 0.25f * static_cast<float>(head % 5);
            head_values_[test.query_heads + head] = 0.125f / static_cast<float>(head + 1);
        }
        describe();
    }

    /// The kernels, into out().
    template <class tiles>
    void run(thread_order order) {
        for (std::byte& each : out_.bytes) each = std::byte{0xee};
        const uint32_t bytes = kernels::attend_memory<tiles>::bytes(call_.place);
        launch_report report = launch({.blocks = kernels::attend_blocks(call_),
                                       .threads = kernels::attend_threads,
                                       .shared_bytes = bytes,
                                       .order = order},
                                      [&] { kernels::attend_pieces<context, tiles>(call_); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        report = launch({.blocks = kernels::join_blocks(call_),
                         .threads = kernels::attend_threads,
                         .order = order},
                        [&] { kernels::join_pieces<context>(call_); });
        REQUIRE_MESSAGE(report.clean(), report.text());
    }

    /// Against the reference: the largest error, in units of the largest value.
    double error() const {
        const uint32_t dim = test_.lane.value_dim;
        std::vector<float> expected(size_t{all_rows_} * test_.query_heads * dim);
        std::vector<float> expected_log_sums(size_t{all_rows_} * test_.query_heads);
        refer(expected, expected_log_sums);
        double largest = 0.0, worst = 0.0;
        for (uint32_t row = 0; row < all_rows_; ++row) {
            // Rows behind those of a short sequence belong to nobody.
            if (row % test_.rows >= rows_of(row / test_.rows)) continue;
            for (uint32_t head = 0; head < test_.query_heads; ++head) {
                const size_t at = size_t{row} * test_.query_heads + head;
                const double log_sum_error =
                    std::abs(double{log_sums_[at]} - double{expected_log_sums[at]});
                CHECK(log_sum_error < 0.02);
                for (uint32_t i = 0; i < dim; ++i) {
                    const double right = expected[at * dim + i];
                    const double difference = std::abs(double{out_.get(row, head, i)} - right);
                    if (!(difference <= worst)) worst = difference;  // NaN is the worst
                    largest = std::max(largest, std::abs(right));
                }
            }
        }
        return worst / largest;
    }
    const device_tensor& out() const { return out_; }
    /// Nothing is to be done for any sequence but one, and that in the opposite order.
    void leave_alone(uint32_t sequence) {
        std::reverse(on_pieces_->begin(), on_pieces_->end());
        for (kernels::attend_piece& piece : *on_pieces_) {
            if (piece.sequence != sequence) piece.sequence = kernels::no_sequence;
        }
        for (kernels::attend_sequence& each : *on_sequences_) {
            if (each.first_row != sequence) each.table = kernels::no_sequence;
        }
    }
    std::vector<float> row(uint32_t index) const {
        std::vector<float> numbers;
        for (uint32_t head = 0; head < test_.query_heads; ++head) {
            for (uint32_t i = 0; i < out_.dim; ++i) numbers.push_back(out_.get(index, head, i));
        }
        return numbers;
    }

  private:
    size_t partials() const { return size_t{all_rows_} * most_pieces; }
    uint32_t rows_of(uint32_t s) const { return std::min(test_.rows, slots_[s]); }
    kvrt::block_numbering numbering() const {
        return kvrt::block_numbering(lane_.layout.block_bytes / kvrt::block_unit);
    }
    size_t position_count() const {
        const uint32_t most = *std::max_element(lane_.ids.begin(), lane_.ids.end());
        return (numbering().index(most) + 1) * test_.lane.kv_heads * test_.lane.block_tokens;
    }
    /// Slots whose positions are stored, which are twice as far apart.
    uint32_t explicit_slots(uint32_t s) const { return test_.slopes ? slots_[s] / 2 : 0; }
    uint32_t next_position(uint32_t s) const { return slots_[s] + explicit_slots(s) + 3; }
    /// Of row 0.
    int32_t window_first(uint32_t s) const {
        return static_cast<int32_t>(slots_[s] - rows_of(s) + 1) -
               static_cast<int32_t>(test_.window);
    }

    void write() {
        kvrt::executor threads;
        for (uint32_t s = 0; s < sequences_; ++s) {
            device_tensor keys(number::f32, slots_[s], test_.lane.kv_heads, test_.lane.key_dim);
            device_tensor values(number::f32, slots_[s], test_.lane.kv_heads, test_.lane.value_dim);
            keys.fill(100 + s);
            values.fill(200 + s);
            for (int32_t slot = static_cast<int32_t>(test_.window_sinks);
                 slot < window_first(s) && test_.window != 0; ++slot) {
                keys.put(static_cast<uint32_t>(slot), 0, 1, std::nanf(""));
                values.put(static_cast<uint32_t>(slot), 0, 1, std::nanf(""));
            }
            const kvrt::write_item item{lane_.table_of(s), 0, 0, slots_[s], 0};
            kvrt::write_rows(lane_.layout, lane_.arena.data(), &item, 1, keys.view(), values.view(),
                             {}, threads);
            kvrt::position_store store = positions();
            for (uint32_t slot = 0; slot < explicit_slots(s); ++slot) {
                const uint32_t tokens = test_.lane.block_tokens;
                for (uint32_t head = 0; head < test_.lane.kv_heads; ++head) {
                    store.of(lane_.table_of(s)[slot / tokens], head)[slot % tokens] = 2 * slot;
                }
            }
        }
    }
    kvrt::position_store positions() const {
        return {const_cast<uint32_t*>(positions_.data()), numbering(),
                test_.lane.kv_heads * test_.lane.block_tokens, test_.lane.block_tokens};
    }

    void describe() {
        std::vector<kernels::attend_sequence> sequences;
        std::vector<kernels::attend_piece> pieces;
        uint32_t partial = 0;
        for (uint32_t s = 0; s < sequences_; ++s) {
            const uint32_t first = partial;
            uint32_t count = 0;
            const uint32_t each = kernels::attend_piece_slots(slots_[s]);
            for (uint32_t slot = 0; slot < slots_[s]; slot += each) {
                pieces.push_back({s, slot, std::min(slot + each, slots_[s]), partial});
                partial += rows_of(s);
                ++count;
            }
            sequences.push_back({s,
                                 s * test_.rows,
                                 rows_of(s),
                                 slots_[s],
                                 explicit_slots(s),
                                 next_position(s),
                                 window_first(s),
                                 first,
                                 count,
                                 {}});
        }
        pieces.push_back({kernels::no_sequence, 0, 0, 0});
        on_sequences_ =
            std::make_unique<device_array<kernels::attend_sequence>>(std::move(sequences));
        on_pieces_ = std::make_unique<device_array<kernels::attend_piece>>(std::move(pieces));
        call_.arena = lane_.arena.data();
        call_.place = lane_.place;
        call_.tables = lane_.device_tables();
        call_.positions = kernels::describe(positions(), positions_.data());
        call_.sequences = on_sequences_->data();
        call_.pieces = on_pieces_->data();
        call_.sequence_count = sequences_;
        call_.piece_count = static_cast<uint32_t>(on_pieces_->size());
        call_.queries = queries_.place;
        call_.out = out_.place;
        call_.query_type = test_.query;
        call_.out_type = test_.out;
        call_.partials = {largest_.data(), sum_.data(), values_.data()};
        call_.log_sum_exp = log_sums_.data();
        call_.query_heads = call_.row_heads = test_.query_heads;
        call_.scale = 1.0f / std::sqrt(static_cast<float>(test_.lane.key_dim));
        call_.softcap = test_.softcap;
        if (test_.sinks) call_.sink_logits = head_values_.data();
        if (test_.slopes) call_.alibi_slopes = head_values_.data() + test_.query_heads;
        call_.window = test_.window != 0;
        call_.window_sinks = test_.window_sinks;
        call_.most_rows = test_.rows;
    }

    void refer(std::vector<float>& expected, std::vector<float>& log_sums) const {
        kvrt::attend_layer layer;
        layer.layout = lane_.layout;
        layer.query_heads = test_.query_heads;
        layer.kv_heads = test_.lane.kv_heads;
        layer.scale = call_.scale;
        layer.softcap = test_.softcap;
        layer.sink_logits = call_.sink_logits;
        layer.alibi_slopes = call_.alibi_slopes;
        layer.window = test_.window;
        layer.window_sinks = test_.window_sinks;
        std::vector<kvrt::attend_item> items(sequences_);
        for (uint32_t s = 0; s < sequences_; ++s) {
            items[s].blocks = lane_.table_of(s);
            items[s].first_row = s * test_.rows;
            items[s].rows = rows_of(s);
            items[s].slots = slots_[s];
            items[s].explicit_slots = explicit_slots(s);
            items[s].window_first = window_first(s);
            items[s].next_position = next_position(s);
        }
        kvrt::attend_call reference;
        reference.layer = &layer;
        reference.arena = lane_.arena.data();
        reference.positions = positions();
        reference.items = items.data();
        reference.item_count = sequences_;
        reference.queries = queries_.view();
        reference.out.data = reinterpret_cast<std::byte*>(expected.data());
        reference.out.type = kvrt::element::f32;
        reference.out.head_stride = test_.lane.value_dim;
        reference.out.row_stride = int64_t{test_.query_heads} * test_.lane.value_dim;
        reference.log_sum_exp = log_sums.data();
        kvrt::attend_reference(reference);
    }

    attend_case test_;
    std::vector<uint32_t> slots_;
    uint32_t sequences_, all_rows_;
    lane lane_;
    device_tensor queries_, out_;
    device_array<float> largest_, sum_, values_, log_sums_, head_values_;
    device_array<uint32_t> positions_;
    std::unique_ptr<device_array<kernels::attend_sequence>> on_sequences_;
    std::unique_ptr<device_array<kernels::attend_piece>> on_pieces_;
    kernels::attend_parameters call_;
};

/// In all orders, against the reference; the same bytes whatever the order, where products are
/// summed alike.
template <class tiles>
void check(const attend_case& test, double bound) {
    CAPTURE(test.lane.text());
    attention_on_device here(test);
    std::vector<std::byte> first;
    for (const thread_order order : tested_orders) {
        here.run<tiles>(order);
        CHECK(here.error() < bound);
        if (order == thread_order::ascending) first = here.out().bytes.copy();
        if (order == thread_order::descending) CHECK(here.out().bytes.copy() == first);
    }
}

// Values, weights and results are rounded to 11 and 8 bits; of many errors most cancel, of few two
// roundings of the largest result may be left.
constexpr double f16_bound = 2.0 / 2048, bf16_bound = 1.0 / 256;

template <number type, uint32_t channels>
using half = kernels::half_tiles<context, type, channels>;
template <uint32_t channels>
using bytes = kernels::code_tiles<context, false, false, channels>;
template <uint32_t channels>
using nibbles = kernels::code_tiles<context, true, true, channels>;
using bytes_nibbles = kernels::code_tiles<context, false, true, 128>;

}  // namespace

TEST_CASE("attend kernel: 16-bit storage") {
    check<half<number::f16, 64>>({{}, number::f16, number::f16}, f16_bound);
    if (few_cases) return;
    check<half<number::bf16, 128>>({{.block_tokens = 32,
                                     .key_dim = 128,
                                     .value_dim = 128,
                                     .key_format = KV_FORMAT_BF16,
                                     .value_format = KV_FORMAT_BF16},
                                    number::bf16,
                                    number::f32,
                                    16},
                                   bf16_bound);
    check<half<number::f16, 128>>(
        {{.order = tile_order::hnd, .key_dim = 72, .value_dim = 120}, number::f32, number::f32, 2},
        f16_bound);
    check<half<number::f16, 256>>(
        {{.order = tile_order::nhd, .kv_heads = 1, .key_dim = 256, .value_dim = 200},
         number::f16,
         number::f32,
         20},
        f16_bound);
}

TEST_CASE("attend kernel: windows, sinks, soft-caps and slopes") {
    attend_case test{{.key_dim = 72, .value_dim = 64}, number::f16, number::f32, 6};
    if (few_cases) test.query_heads = 2;
    test.window = 21;
    check<half<number::f16, 128>>(test, f16_bound);
    if (few_cases) return;
    test.window_sinks = 5;
    test.sinks = true;
    check<half<number::f16, 128>>(test, f16_bound);
    test.window = 300;
    test.softcap = 3.0f;
    check<half<number::f16, 128>>(test, f16_bound);
    test.window = test.window_sinks = 0;
    test.slopes = true;
    check<half<number::f16, 128>>(test, f16_bound);
}

TEST_CASE("attend kernel: the batch does not change a bit") {
    attention_on_device here({{}, number::f16, number::f32});
    const uint32_t last = static_cast<uint32_t>(lengths().size()) - 1;
    here.run<half<number::f16, 64>>(thread_order::ascending);
    const std::vector<float> among_others = here.row(last);
    here.leave_alone(last);
    here.run<half<number::f16, 64>>(thread_order::descending);
    CHECK(here.row(last) == among_others);
    // Nobody wrote the others' rows: they are as `run` left them.
    float untouched = 0.0f;
    std::memset(&untouched, 0xee, sizeof untouched);
    if (last != 0) CHECK(here.row(0) == std::vector<float>(here.row(0).size(), untouched));
}

TEST_CASE("attend kernel: several rows of a sequence") {
    attend_case test{{.key_dim = 64, .value_dim = 64}, number::f16, number::f32, 6};
    test.rows = few_cases ? 2 : 7;  // 21 query vectors: two tiles
    check<half<number::f16, 64>>(test, f16_bound);
    if (few_cases) return;
    test.window = 20;
    test.window_sinks = 3;
    test.slopes = true;
    check<half<number::f16, 64>>(test, f16_bound);
    test.lane.key_format = test.lane.value_format = KV_FORMAT_INT4_TOKEN;
    check<nibbles<64>>(test, f16_bound);
}

TEST_CASE("attend kernel: all codes become the f16 that they stand for") {
    struct reading {
        kernels::coding codes;
        float (*number_of)(uint8_t);
        uint32_t count;
    };
    const reading readings[] = {
        {kernels::coding::int8_token,
         [](uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }, 256},
        {kernels::coding::int4_token, [](uint8_t code) { return static_cast<float>(code); }, 16},
        {kernels::coding::fp8_token, kvrt::e4m3_to_f32, 256},
        {kernels::coding::fp8_e4m3, kvrt::e4m3_to_f32, 256},
        {kernels::coding::fp8_e5m2, kvrt::e5m2_to_f32, 256},
    };
    for (const reading& each : readings) {
        CAPTURE(static_cast<uint32_t>(each.codes));
        for (uint32_t code = 0; code < each.count; ++code) {
            for (uint32_t at = 0; at < 4; ++at) {
                uint32_t pairs[2];
                kernels::bytes_to_f16<context>(each.codes, code << (8 * at), pairs);
                for (uint32_t i = 0; i < 4; ++i) {
                    const float right = each.number_of(static_cast<uint8_t>(i == at ? code : 0));
                    const float got =
                        kernels::code_unit(each.codes) *
                        kvrt::f16_to_f32(static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2))));
                    REQUIRE((got == right || (std::isnan(got) && std::isnan(right))));
                }
            }
        }
    }
}

TEST_CASE("attend kernel: storage in bytes") {
    const auto of = [](uint32_t keys, uint32_t values, uint32_t key_dim, uint32_t value_dim) {
        return lane_description{
            .key_dim = key_dim, .value_dim = value_dim, .key_format = keys, .value_format = values};
    };
    const lane_description int8 = of(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN, 64, 64);
    check<bytes<64>>({int8, number::f16, number::f16}, f16_bound);
    if (few_cases) return;
    check<bytes<128>>({of(KV_FORMAT_FP8_TOKEN, KV_FORMAT_FP8_E4M3, 72, 120), number::f32,
                       number::f32, 6, 100, 20},
                      f16_bound);
    check<bytes<256>>(
        {of(KV_FORMAT_FP8_E5M2, KV_FORMAT_FP8_TOKEN, 256, 40), number::bf16, number::f32, 20},
        f16_bound);
}

TEST_CASE("attend kernel: storage in nibbles") {
    lane_description int4{.key_format = KV_FORMAT_INT4_TOKEN, .value_format = KV_FORMAT_INT4_TOKEN};
    check<nibbles<64>>({int4, number::f16, number::f16}, f16_bound);
    if (few_cases) return;
    int4.key_dim = 72;
    int4.value_dim = 120;
    check<nibbles<128>>({int4, number::f32, number::f32, 6, 100, 20, 3.0f, true}, f16_bound);
    int4.key_format = KV_FORMAT_INT8_TOKEN;  // keys in bytes, values in nibbles
    check<bytes_nibbles>({int4, number::f16, number::f32, 6}, f16_bound);
    int4.key_format = KV_FORMAT_INT4_TOKEN;
    int4.key_dim = 248;
    int4.value_dim = 136;
    int4.block_tokens = 32;
    check<nibbles<256>>({int4, number::bf16, number::f32, 2, 0, 0, 0.0f, false, true}, f16_bound);
}

TEST_CASE("attend kernel: shared memory fits a multiprocessor of sm_80 at the widest rows") {
    constexpr uint32_t most = 163 << 10;
    const auto place_of = [](uint32_t format, uint32_t dim) {
        const lane here({.kv_heads = 1,
                         .key_dim = dim,
                         .value_dim = dim,
                         .key_format = format,
                         .value_format = format},
                        1, 1);
        return here.place;
    };
    CHECK(kernels::attend_memory<half<number::f16, 256>>::bytes(place_of(KV_FORMAT_F16, 256)) <=
          most);
    CHECK(kernels::attend_memory<half<number::f16, 128>>::bytes(place_of(KV_FORMAT_F16, 128)) <=
          most);
    CHECK(kernels::attend_memory<bytes<256>>::bytes(place_of(KV_FORMAT_INT8_TOKEN, 256)) <= most);
    CHECK(kernels::attend_memory<nibbles<256>>::bytes(place_of(KV_FORMAT_INT4_TOKEN, 256)) <= most);
}
