// Attention of many rows at once, with its joins, against the library's reference in double, a
// formula, and with each of its barriers left out.
#include "kernels/attend_rows.hpp"

#include "attend_fixture.hpp"
#include "defects.hpp"
#include "kernels/attend_join.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

class rows_on_device : public attend_fixture {
  public:
    /// Pieces are those of cut_rows, or of so many slots.
    rows_on_device(const attend_case& what, const std::vector<sequence_shape>& shapes,
                   uint32_t piece_slots = 0)
        : attend_fixture(what, shapes, partials(what, shapes, piece_slots)) {
        std::vector<kernels::attend_sequence> listed;
        std::vector<kernels::rows_piece> pieces{{kernels::no_sequence, 0, 0, 0, 0, 0}};
        uint32_t partial = 0, most_joined = 1;
        for (uint32_t s = 0; s < count(); ++s) {
            const sequence_shape& shape = sequences[s];
            const kernels::rows_cut cut = cut_of(what, shape);
            const uint32_t number = pieces_of(what, shape, piece_slots);
            for (uint32_t tile = 0; tile < cut.tiles; ++tile) {
                for (uint32_t i = 0; i < number; ++i) {
                    if (piece_slots == 0) {
                        pieces.push_back(cut.piece(s, tile, i, partial));
                        continue;
                    }
                    kernels::rows_piece piece = cut.piece(s, tile, 0, partial);
                    piece.first_slot = i * piece_slots;
                    piece.end_slot = std::min(piece.first_slot + piece_slots, shape.slots);
                    piece.partial = partial + i * shape.rows;
                    pieces.push_back(piece);
                }
            }
            const bool at_once = piece_slots == 0 && cut.at_once();
            listed.push_back(sequence(s, partial, at_once ? 0 : number));
            if (at_once) continue;
            partial += number * shape.rows;
            most_joined = std::max(most_joined, shape.rows);
        }
        on_sequences_ = std::make_unique<device_array<kernels::attend_sequence>>(listed);
        on_pieces_ = std::make_unique<device_array<kernels::rows_piece>>(pieces);
        describe(call_);
        call_.sequences = on_sequences_->data();
        call_.sequence_count = count();
        call_.row_pieces = on_pieces_->data();
        call_.row_piece_count = static_cast<uint32_t>(pieces.size());
        call_.most_rows = most_joined;
    }

    /// The kernels, into out(). What is wrong with the first of them.
    template <class tiles, class Cx = context>
    launch_report run(thread_order order) {
        forget();
        const launch_report report =
            launch({.blocks = kernels::rows_blocks(call_),
                    .threads = kernels::rows_threads,
                    .shared_bytes = kernels::rows_memory<tiles>::bytes(call_.place),
                    .order = order},
                   [&] { kernels::attend_rows<Cx, tiles>(call_); });
        const launch_report of_join = launch({.blocks = kernels::join_blocks(call_),
                                              .threads = kernels::attend_threads,
                                              .order = order},
                                             [&] { kernels::join_pieces<context>(call_); });
        REQUIRE_MESSAGE(of_join.clean(), of_join.text());
        return report;
    }

    static kernels::rows_cut cut_of(const attend_case& what, const sequence_shape& shape) {
        const int32_t first = what.window == 0
                                  ? 0
                                  : static_cast<int32_t>(shape.slots + 1 - shape.rows) -
                                        static_cast<int32_t>(what.window);
        return kernels::cut_rows(shape.rows, what.query_heads / what.lane.kv_heads, shape.slots,
                                 first, what.window_sinks);
    }

  private:
    static uint32_t pieces_of(const attend_case& what, const sequence_shape& shape,
                              uint32_t piece_slots) {
        if (piece_slots == 0) return cut_of(what, shape).pieces;
        return (shape.slots + piece_slots - 1) / piece_slots;
    }
    static size_t partials(const attend_case& what, const std::vector<sequence_shape>& shapes,
                           uint32_t piece_slots) {
        size_t sum = 1;
        for (const sequence_shape& each : shapes) {
            sum += size_t{each.rows} * pieces_of(what, each, piece_slots);
        }
        return sum;
    }

    std::unique_ptr<device_array<kernels::attend_sequence>> on_sequences_;
    std::unique_ptr<device_array<kernels::rows_piece>> on_pieces_;
    kernels::rows_parameters call_;
};

/// In all orders, against the reference; the same bytes whatever the order, where products are
/// summed alike.
template <class tiles>
void check(const attend_case& test, std::vector<sequence_shape> shapes, double bound,
           uint32_t piece_slots = 0) {
    CAPTURE(test.lane.text());
    if (few_cases) shapes = {{40, 17}};
    rows_on_device here(test, shapes, piece_slots);
    std::vector<std::byte> first;
    for (const thread_order order : tested_orders) {
        const launch_report report = here.run<tiles>(order);
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(here.error() < bound);
        if (order == thread_order::ascending) first = here.out().bytes.copy();
        if (order == thread_order::descending) CHECK(here.out().bytes.copy() == first);
    }
}

lane_description lane_of(uint32_t format, uint32_t key_dim, uint32_t value_dim,
                         tile_order order = tile_order::native, uint32_t kv_heads = 2,
                         uint32_t block_tokens = 16) {
    return {order, block_tokens, kv_heads, key_dim, value_dim, format, format};
}

/// Chunks of prompts with and without a history, single rows, drafts over several pieces.
const std::vector<sequence_shape> mixed = {{45, 13}, {1, 1}, {17, 17}, {700, 5}};

}  // namespace

TEST_CASE("attend rows: how contexts are cut") {
    struct shape {
        uint32_t rows, group, slots, window, sinks, pieces;
    };
    const shape shapes[] = {
        {1, 1, 1, 0, 0, 1},         {2, 4, 256, 0, 0, 1},         {2, 4, 257, 0, 0, 2},
        {4, 8, 100000, 0, 0, 63},   {16, 8, 16384, 0, 0, 16},     {16, 8, 1025, 0, 0, 2},
        {4096, 8, 100000, 0, 0, 1}, {4, 7, 50000, 1000, 4, 5},    {4, 7, 50000, 1000, 100, 5},
        {3, 1, 1000, 5000, 64, 4},  {4, 1, 1000, 1, 0, 1},        {300, 1, 300, 17, 3, 1},
        {70, 7, 20000, 0, 0, 4},    {4, 7, 50000, 49990, 70, 61},
    };
    for (const shape& each : shapes) {
        CAPTURE(each.rows);
        CAPTURE(each.slots);
        const int32_t first = each.window == 0 ? 0
                                               : static_cast<int32_t>(each.slots + 1 - each.rows) -
                                                     static_cast<int32_t>(each.window);
        const kernels::rows_cut cut =
            kernels::cut_rows(each.rows, each.group, each.slots, first, each.sinks);
        CHECK(cut.pieces == each.pieces);
        uint32_t vectors = 0, end = 0;
        for (uint32_t tile = 0; tile < cut.tiles; ++tile) {
            const kernels::rows_piece piece = cut.piece(3, tile, 0, 100);
            CHECK(piece.first_vector == vectors);
            CHECK(piece.vectors <= kernels::tile_vectors);
            vectors += piece.vectors;
        }
        CHECK(vectors == each.rows * each.group);
        for (uint32_t i = 0; i < cut.pieces; ++i) {
            const kernels::rows_piece piece = cut.piece(3, 0, i, 100);
            CHECK(piece.first_slot == end);  // holes lie within pieces
            CHECK(piece.first_slot % kernels::piece_unit == 0);
            CHECK(piece.end_slot > piece.first_slot);
            CHECK(piece.partial ==
                  (cut.pieces == 1 ? kernels::written_at_once : 100 + i * each.rows));
            end = piece.end_slot;
        }
        CHECK(end == each.slots);
    }
}

TEST_CASE("attend rows: 16-bit storage") {
    check<half<number::f16, 64>>({lane_of(KV_FORMAT_F16, 64, 64), number::f16, number::f16, 2},
                                 mixed, f16_bound);
    if (few_cases) return;
    check<half<number::bf16, 128>>({lane_of(KV_FORMAT_BF16, 128, 128, tile_order::native, 1, 32),
                                    number::bf16, number::f32, 4},
                                   {{90, 40}, {700, 8}}, bf16_bound);
    check<half<number::f16, 128>>(
        {lane_of(KV_FORMAT_F16, 80, 96, tile_order::hnd), number::f32, number::f32, 14},
        {{300, 11}, {37, 19}}, f16_bound);
    check<half<number::bf16, 128>>(
        {lane_of(KV_FORMAT_BF16, 96, 80, tile_order::nhd), number::f16, number::bf16, 16},
        {{300, 3}, {9, 9}}, bf16_bound);
    check<half<number::f16, 256>>(
        {lane_of(KV_FORMAT_F16, 256, 256, tile_order::native, 1), number::f16, number::f32, 8},
        {{130, 5}, {40, 17}}, f16_bound);
    check<half<number::f16, 256>>(
        {lane_of(KV_FORMAT_F16, 136, 200, tile_order::nhd), number::f16, number::f32, 4},
        {{600, 2}}, f16_bound);
}

TEST_CASE("attend rows: windows, sinks, soft-caps and slopes") {
    attend_case test{lane_of(KV_FORMAT_F16, 64, 64), number::f16, number::f32, 4};
    test.window = 5;
    check<half<number::f16, 64>>(test, mixed, f16_bound);
    if (few_cases) return;
    test.sinks = true;
    test.window_sinks = 3;
    check<half<number::f16, 64>>(test, mixed, f16_bound);
    test.window = 100;
    test.window_sinks = 70;
    check<half<number::f16, 64>>(test, {{700, 41}, {300, 4}}, f16_bound);
    test.window = 450;
    test.window_sinks = 0;
    test.softcap = 3.0f;
    check<half<number::f16, 64>>(test, mixed, f16_bound);
    test.window = 0;
    test.slopes = true;
    check<half<number::f16, 64>>(test, mixed, f16_bound);
    test.softcap = 0.0f;
    test.query_heads = 2;
    check<half<number::f16, 64>>(test, mixed, f16_bound);
}

// As where blocks are sealed, whose pieces are launched apart.
TEST_CASE("attend rows: pieces that end at any group") {
    attend_case test{lane_of(KV_FORMAT_F16, 64, 64), number::f16, number::f32, 4};
    if (few_cases) return;
    check<half<number::f16, 64>>(test, {{150, 21}}, f16_bound, 48);
    test.window = 70;
    test.window_sinks = 5;
    check<half<number::f16, 64>>(test, {{90, 9}}, f16_bound, 16);
}

TEST_CASE("attend rows: storage in bytes") {
    check<bytes<64>>({lane_of(KV_FORMAT_INT8_TOKEN, 64, 64), number::f16, number::f16, 4}, mixed,
                     f16_bound);
    if (few_cases) return;
    attend_case test{lane_of(KV_FORMAT_FP8_TOKEN, 80, 96), number::f32, number::f32, 14, 100, 20};
    test.lane.value_format = KV_FORMAT_FP8_E4M3;
    check<bytes<128>>(test, {{300, 11}, {37, 19}}, f16_bound);
    test = {lane_of(KV_FORMAT_FP8_E5M2, 256, 40), number::bf16, number::f32, 16};
    test.lane.value_format = KV_FORMAT_FP8_TOKEN;
    check<bytes<256>>(test, {{300, 3}, {21, 21}}, f16_bound);
}

TEST_CASE("attend rows: storage in nibbles") {
    check<nibbles<64>>({lane_of(KV_FORMAT_INT4_TOKEN, 64, 64), number::f16, number::f16, 4}, mixed,
                       f16_bound);
    if (few_cases) return;
    check<nibbles<128>>(
        {lane_of(KV_FORMAT_INT4_TOKEN, 72, 120), number::f32, number::f32, 14, 100, 20, 3.0f, true},
        {{300, 11}, {37, 19}}, f16_bound);
    attend_case mixed_codes{lane_of(KV_FORMAT_INT8_TOKEN, 72, 120), number::f16, number::f32, 6};
    mixed_codes.lane.value_format = KV_FORMAT_INT4_TOKEN;
    check<bytes_nibbles>(mixed_codes, {{100, 21}}, f16_bound);
    check<nibbles<256>>({lane_of(KV_FORMAT_INT4_TOKEN, 248, 136, tile_order::native, 2, 32),
                         number::bf16, number::f32, 2, 0, 0, 0.0f, false, true},
                        {{300, 3}, {21, 21}}, f16_bound);
}

TEST_CASE("attend rows: a value that is no number spoils the rows that see it alone") {
    attend_case test{lane_of(KV_FORMAT_F16, 64, 64), number::f16, number::f32, 4};
    test.spoiled_slots = 3;
    check<half<number::f16, 64>>(test, mixed, f16_bound);
    if (few_cases) return;
    test.lane = lane_of(KV_FORMAT_BF16, 64, 64, tile_order::hnd);
    test.window = 2;  // the last row does not see the first of them
    check<half<number::bf16, 64>>(test, mixed, bf16_bound);
    for (const uint32_t format : {KV_FORMAT_INT8_TOKEN, KV_FORMAT_FP8_TOKEN, KV_FORMAT_FP8_E5M2}) {
        test.lane = lane_of(format, 64, 64);
        check<bytes<64>>(test, mixed, f16_bound);
    }
    test.lane = lane_of(KV_FORMAT_INT4_TOKEN, 64, 64);
    check<nibbles<64>>(test, mixed, f16_bound);
}

TEST_CASE("attend rows: shared memory fits a multiprocessor of sm_80 at the widest rows") {
    constexpr uint32_t most = 163 << 10;
    const auto place_of = [](uint32_t format, uint32_t dim) {
        const bool plain = format == KV_FORMAT_F16;
        const tile_order order = plain ? tile_order::hnd : tile_order::native;
        return lane(lane_of(format, dim, dim, order, 1), 1, 1).place;
    };
    using kernels::rows_memory;
    CHECK(rows_memory<half<number::f16, 64>>::bytes(place_of(KV_FORMAT_F16, 64)) == 56320);
    CHECK(rows_memory<half<number::f16, 128>>::bytes(place_of(KV_FORMAT_F16, 128)) <= most);
    CHECK(rows_memory<half<number::f16, 256>>::bytes(place_of(KV_FORMAT_F16, 256)) <= most);
    CHECK(rows_memory<bytes<256>>::bytes(place_of(KV_FORMAT_INT8_TOKEN, 256)) <= most);
}

// Queries of 0 weigh all slots alike; a value says which slot it is of. So a row's output is the
// mean number of the slots that it sees.
TEST_CASE("attend rows: means of slot numbers") {
    struct shape {
        uint32_t group, rows, slots, window, sinks;
    };
    const shape shapes[] = {{1, 3, 33, 0, 0},    {2, 35, 50, 0, 0},  {4, 33, 33, 0, 0},
                            {7, 19, 140, 0, 0},  {8, 16, 400, 0, 0}, {7, 9, 300, 40, 6},
                            {1, 129, 129, 8, 1}, {2, 16, 600, 80, 2}};
    for (const shape& each : shapes) {
        CAPTURE(each.group);
        CAPTURE(each.rows);
        attend_case test{lane_of(KV_FORMAT_F16, 64, 64), number::f32, number::f32, 2 * each.group};
        test.window = each.window;
        test.window_sinks = each.sinks;
        rows_on_device here(test, {{each.slots, each.rows}});
        for (std::byte& byte : here.queries().bytes) byte = std::byte{0};
        device_tensor keys(number::f32, each.slots, 2, 64), values(number::f32, each.slots, 2, 64);
        keys.fill(3);
        for (uint32_t slot = 0; slot < each.slots; ++slot) {
            for (uint32_t i = 0; i < 64; ++i) {
                values.put(slot, 0, i, static_cast<float>(slot));
                values.put(slot, 1, i, -static_cast<float>(slot));
            }
        }
        here.write(0, keys, values);
        const launch_report report = here.run<half<number::f16, 64>>(thread_order::shuffled);
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (uint32_t row = 0; row < each.rows; ++row) {
            const uint32_t limit = each.slots - each.rows + row + 1;
            double sum = 0.0;
            uint32_t seen = 0;
            for (uint32_t slot = 0; slot < limit; ++slot) {
                const bool within = each.window == 0 || slot + each.window >= limit;
                if (!within && slot >= each.sinks) continue;
                sum += slot;
                ++seen;
            }
            for (uint32_t head = 0; head < 2 * each.group; ++head) {
                const double right = (head < each.group ? sum : -sum) / seen;
                REQUIRE(here.out().get(row, head, 5) == doctest::Approx(right).epsilon(1e-5));
            }
        }
        if (few_cases) break;
    }
}

namespace {

/// All threads run through their barrier number `left_out`.
struct context_without_barrier : context {
    static inline uint32_t left_out = 0;
    static inline std::vector<uint32_t> passed;

    static void barrier(KVRT_FROM_SITE) {
        if (passed[block() * threads() + thread()]++ == left_out) return;
        context::barrier(function, line);
    }
};

}  // namespace

bool rows_without_barrier(uint32_t barrier, thread_order order, uint32_t slots, uint32_t rows) {
    attend_case test{lane_of(KV_FORMAT_F16, 64, 64, tile_order::native, 1), number::f16,
                     number::f32, 4};
    rows_on_device here(test, {{slots, rows}});
    context_without_barrier::left_out = barrier;
    context_without_barrier::passed.assign(2 * kernels::rows_threads, 0);
    const launch_report report = here.run<half<number::f16, 64>, context_without_barrier>(order);
    return report.clean() && here.error() < f16_bound;
}

// The first, behind which queries are read, is for the thread sanitizer (sanitizer_test.cpp):
// all warps take as long to write them.
TEST_CASE("attend rows: no barrier may be left out") {
    if (few_cases) return;
    // Registers hold queries; four stages; stages are done with; parts are there; no such barrier.
    for (uint32_t barrier = 1; barrier <= 8; ++barrier) {
        CAPTURE(barrier);
        bool right = true;
        for (const thread_order order : emulator::all_orders) {
            right = right && rows_without_barrier(barrier, order, 200, 15);
        }
        CHECK(right == (barrier == 8));
    }
}

TEST_CASE("attend_rows kernel: weights of the last rows are kept, where output is written, too") {
    attend_case test{.lane = {.key_dim = 64, .value_dim = 64},
                     .query = number::f32,
                     .out = number::f32,
                     .query_heads = 6,
                     .kept_rows = 20};
    std::vector<sequence_shape> shapes{{70, 50}, {200, 9}, {33, 20}};
    if (few_cases) shapes = {{40, 17}};
    for (const uint32_t piece_slots : {0u, 64u}) {
        CAPTURE(piece_slots);
        rows_on_device here(test, shapes, piece_slots);
        for (const thread_order order : tested_orders) {
            const launch_report report = here.run<half<number::f16, 64>>(order);
            REQUIRE_MESSAGE(report.clean(), report.text());
            CHECK(here.kept_error() < 5e-4);
            CHECK(here.error() < f16_bound);
        }
    }
}
