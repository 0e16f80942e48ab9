// Attention of decoded tokens and of few rows, pieces and their join, against the library's
// reference in double.
#include "attend_fixture.hpp"
#include "format/small_float.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t most_pieces = 3;

/// Lengths of the sequences: one slot, ends of groups and beside them, several pieces. So many rows
/// of each, where there are as many slots.
std::vector<sequence_shape> lengths(uint32_t rows = 1) {
    std::vector<sequence_shape> shapes{{1}, {16}, {37}, {530}};
    if (few_cases) shapes = {{33}};
    for (sequence_shape& each : shapes) each.rows = std::min(rows, each.slots);
    return shapes;
}

class attention_on_device : public attend_fixture {
  public:
    explicit attention_on_device(const attend_case& what, uint32_t rows = 1)
        : attend_fixture(what, lengths(rows), lengths().size() * rows * most_pieces) {
        std::vector<kernels::attend_sequence> listed;
        std::vector<kernels::attend_piece> pieces;
        uint32_t partial = 0;
        for (uint32_t s = 0; s < count(); ++s) {
            const uint32_t slots = sequences[s].slots, each = kernels::attend_piece_slots(slots);
            const uint32_t first = partial;
            uint32_t number = 0;
            for (uint32_t slot = 0; slot < slots; slot += each) {
                pieces.push_back({s, slot, std::min(slot + each, slots), partial});
                partial += sequences[s].rows;
                ++number;
            }
            listed.push_back(sequence(s, first, number));
        }
        pieces.push_back({kernels::no_sequence, 0, 0, 0});
        on_sequences_ = std::make_unique<device_array<kernels::attend_sequence>>(listed);
        on_pieces_ = std::make_unique<device_array<kernels::attend_piece>>(pieces);
        describe(call_);
        call_.sequences = on_sequences_->data();
        call_.pieces = on_pieces_->data();
        call_.sequence_count = count();
        call_.piece_count = static_cast<uint32_t>(on_pieces_->size());
    }

    /// The kernels, into out().
    template <class tiles>
    void run(thread_order order) {
        forget();
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

  private:
    std::unique_ptr<device_array<kernels::attend_sequence>> on_sequences_;
    std::unique_ptr<device_array<kernels::attend_piece>> on_pieces_;
    kernels::attend_parameters call_;
};

/// In all orders, against the reference; the same bytes whatever the order, where products are
/// summed alike.
template <class tiles>
void check(const attend_case& test, double bound, uint32_t rows = 1) {
    CAPTURE(test.lane.text());
    attention_on_device here(test, rows);
    std::vector<std::byte> first;
    for (const thread_order order : tested_orders) {
        here.run<tiles>(order);
        CHECK(here.error() < bound);
        if (order == thread_order::ascending) first = here.out().bytes.copy();
        if (order == thread_order::descending) CHECK(here.out().bytes.copy() == first);
    }
}

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
    const uint32_t rows = few_cases ? 2 : 7;  // 21 query vectors: two tiles
    check<half<number::f16, 64>>(test, f16_bound, rows);
    if (few_cases) return;
    test.spoiled_slots = 2;  // which the first rows do not see
    check<half<number::f16, 64>>(test, f16_bound, rows);
    test.spoiled_slots = 0;
    test.window = 20;
    test.window_sinks = 3;
    test.slopes = true;
    check<half<number::f16, 64>>(test, f16_bound, rows);
    test.lane.key_format = test.lane.value_format = KV_FORMAT_INT4_TOKEN;
    check<nibbles<64>>(test, f16_bound, rows);
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

TEST_CASE("attend_decode kernel: weights of the last rows are kept, and outputs are the same") {
    attend_case test{.lane = {.key_dim = 64, .value_dim = 64},
                     .query = number::f32,
                     .out = number::f32,
                     .query_heads = 6,
                     .softcap = 5.0f,
                     .sinks = true};
    for (const uint32_t rows : {1u, 3u}) {
        CAPTURE(rows);
        test.kept_rows = 0;
        attention_on_device plain(test, rows);
        plain.run<half<number::f16, 64>>(thread_order::ascending);
        test.kept_rows = rows == 1 ? 1 : 2;
        attention_on_device keeping(test, rows);
        for (const thread_order order : tested_orders) {
            keeping.run<half<number::f16, 64>>(order);
            CHECK(keeping.kept_error() < 5e-4);
            CHECK(keeping.error() < f16_bound);
            const bool alike = order == thread_order::ascending;  // in which products are summed
            for (uint32_t row = 0; alike && row < keeping.first_row(keeping.count()); ++row) {
                CHECK(keeping.row(row) == plain.row(row));
            }
        }
    }
}
