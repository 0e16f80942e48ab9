// Attention over storages that are opened as they are fetched, over rows that are stored in another
// basis, and over contexts whose older blocks are stored otherwise, against the library's reference
// in double.
#include "attend_fixture.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "kernels/attend_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

/// Every sequence in one piece of sealed blocks, where it has any, and one of the others.
class any_storage : public attend_fixture {
  public:
    any_storage(const attend_case& what, const std::vector<sequence_shape>& shapes)
        : attend_fixture(what, shapes, partials(shapes)) {
        std::vector<kernels::attend_sequence> listed;
        std::vector<kernels::attend_piece> few[2];
        std::vector<kernels::rows_piece> many[2];
        uint32_t partial = 0;
        const uint32_t group = what.query_heads / what.lane.kv_heads;
        for (uint32_t s = 0; s < count(); ++s) {
            const uint32_t rows = sequences[s].rows, vectors = rows * group;
            const uint32_t slots = sequences[s].slots, sealed = sealed_slots(s);
            const uint32_t first[2] = {sealed, 0}, end[2] = {slots, sealed};
            uint32_t pieces = 0;
            const bool at_once = vectors > kernels::query_rows && sealed == 0;
            const uint32_t begin = partial;
            for (const uint32_t kind : {1u, 0u}) {
                if (first[kind] == end[kind]) continue;
                ++pieces;
                if (vectors <= kernels::query_rows) {
                    few[kind].push_back({s, first[kind], end[kind], partial});
                }
                for (uint32_t v = 0; vectors > kernels::query_rows && v < vectors;
                     v += kernels::tile_vectors) {
                    many[kind].push_back({s, v, std::min(kernels::tile_vectors, vectors - v),
                                          first[kind], end[kind],
                                          at_once ? kernels::written_at_once : partial});
                }
                partial += rows;
            }
            listed.push_back(sequence(s, begin, at_once ? 0 : pieces));
        }
        on_sequences_ = std::make_unique<device_array<kernels::attend_sequence>>(listed);
        describe(call_);
        call_.sequences = on_sequences_->data();
        call_.sequence_count = count();
        for (uint32_t kind = 0; kind < 2; ++kind) {
            few[kind].push_back({kernels::no_sequence, 0, 0, 0});
            many[kind].push_back({kernels::no_sequence, 0, 0, 0, 0, 0});
            few_[kind] = std::make_unique<device_array<kernels::attend_piece>>(few[kind]);
            many_[kind] = std::make_unique<device_array<kernels::rows_piece>>(many[kind]);
        }
    }

    template <class tiles, class sealed_tiles>
    void run(thread_order order) {
        forget();
        const kernels::block_place open = call_.place;
        launch_pieces<tiles>(0, order);
        if (test.seals()) {
            call_.place = sealed_place();
            launch_pieces<sealed_tiles>(1, order);
            call_.place = open;
        }
        const launch_report report = launch({.blocks = kernels::join_blocks(call_),
                                             .threads = kernels::attend_threads,
                                             .order = order},
                                            [&] { kernels::join_pieces<context>(call_); });
        REQUIRE_MESSAGE(report.clean(), report.text());
    }

  private:
    template <class tiles>
    void launch_pieces(uint32_t kind, thread_order order) {
        call_.pieces = few_[kind]->data();
        call_.piece_count = static_cast<uint32_t>(few_[kind]->size());
        call_.row_pieces = many_[kind]->data();
        call_.row_piece_count = static_cast<uint32_t>(many_[kind]->size());
        launch_report report =
            launch({.blocks = kernels::attend_blocks(call_),
                    .threads = kernels::attend_threads,
                    .shared_bytes = kernels::attend_memory<tiles>::bytes(call_.place),
                    .order = order},
                   [&] { kernels::attend_pieces<context, tiles>(call_); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        report = launch({.blocks = kernels::rows_blocks(call_),
                         .threads = kernels::rows_threads,
                         .shared_bytes = kernels::rows_memory<tiles>::bytes(call_.place),
                         .order = order},
                        [&] { kernels::attend_rows<context, tiles>(call_); });
        REQUIRE_MESSAGE(report.clean(), report.text());
    }
    static size_t partials(const std::vector<sequence_shape>& shapes) {
        size_t sum = 1;
        for (const sequence_shape& each : shapes) sum += 2 * size_t{each.rows};
        return sum;
    }

    std::unique_ptr<device_array<kernels::attend_sequence>> on_sequences_;
    std::unique_ptr<device_array<kernels::attend_piece>> few_[2];
    std::unique_ptr<device_array<kernels::rows_piece>> many_[2];
    kernels::rows_parameters call_;
};

/// A token, a draft and a prompt.
const std::vector<sequence_shape> shapes = {{37, 1}, {150, 3}, {45, 13}};

template <class tiles, class sealed_tiles = tiles>
void check(const attend_case& test, double bound = f16_bound) {
    CAPTURE(test.lane.text());
    CAPTURE(test.sealed_keys);
    any_storage here(test, few_cases ? std::vector<sequence_shape>{{40, 5}} : shapes);
    for (const thread_order order : tested_orders) {
        here.run<tiles, sealed_tiles>(order);
        CHECK(here.error() < bound);
    }
}

lane_description lane_of(uint32_t keys, uint32_t values, uint32_t key_dim = 64,
                         uint32_t value_dim = 64, tile_order order = tile_order::native) {
    lane_description made;
    made.order = order;
    made.key_dim = key_dim;
    made.value_dim = value_dim;
    made.key_format = keys;
    made.value_format = values;
    return made;
}

}  // namespace

TEST_CASE("attend opened: records of all formats, and pairs that nothing else reads") {
    const auto of = [](const lane_description& lane) {
        return attend_case{lane, number::f16, number::f32, 4};
    };
    check<opened<64>>(of(lane_of(KV_FORMAT_Q8_0, KV_FORMAT_Q4_0)));
    if (few_cases) return;
    check<opened<128>>(of(lane_of(KV_FORMAT_Q4_1, KV_FORMAT_Q8_0, 72, 128)));
    check<opened<64>>(of(lane_of(KV_FORMAT_NVFP4, KV_FORMAT_MXFP4, 40, 64)));
    check<opened<64>>(of(lane_of(KV_FORMAT_MXFP4, KV_FORMAT_NVFP4, 64, 56)));
    check<opened<128>>(of(lane_of(KV_FORMAT_TURBO4, KV_FORMAT_TURBO4, 128, 72)));
    check<opened<64>>(of(lane_of(KV_FORMAT_TURBO3, KV_FORMAT_TURBO3, 64, 40)));
    check<opened<256>>(of(lane_of(KV_FORMAT_TURBO3, KV_FORMAT_INT8_TOKEN, 256, 136)));
    check<opened<64>>(of(lane_of(KV_FORMAT_F32, KV_FORMAT_BF16, 64, 48)));
    check<opened<64>>(of(lane_of(KV_FORMAT_F16, KV_FORMAT_INT4_TOKEN)));
    check<opened<64>>(of(lane_of(KV_FORMAT_INT4_TOKEN, KV_FORMAT_FP8_E5M2)));
    check<opened<64>>(of(lane_of(KV_FORMAT_FP8_TOKEN, KV_FORMAT_FP8_E4M3)));
}

TEST_CASE("attend opened: keys that were levelled, which need their positions") {
    if (few_cases) return;
    attend_case test{lane_of(KV_FORMAT_AFFINE4, KV_FORMAT_INT4_TOKEN), number::f16, number::f32, 4};
    check<opened<64>>(test);
    test.lane.key_dim = 72;
    test.lane.interleaved = true;
    test.slopes = true;  // with them some positions are stored
    check<opened<128>>(test);
}

TEST_CASE("attend opened: keys and queries that are turned by slots") {
    attend_case test{lane_of(KV_FORMAT_F16, KV_FORMAT_F16), number::f16, number::f32, 4};
    test.turned_pairs = 32;
    check<opened<64>>(test);
    if (few_cases) return;
    test.turned_pairs = 16;  // the others are left alone
    test.window = 30;
    check<opened<64>>(test);
    test.turned_pairs = 33;
    test.interleaved = true;
    test.lane = lane_of(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN, 72, 128, tile_order::nhd);
    test.lane.rotate = true;
    check<opened<128>>(test);
}

TEST_CASE("attend opened: other layouts, in which records may have a foreign form") {
    if (few_cases) return;
    const auto of = [](const lane_description& lane) {
        return attend_case{lane, number::f32, number::f16, 6};
    };
    check<opened<64>>(of(lane_of(KV_FORMAT_Q8_0, KV_FORMAT_Q4_1, 64, 64, tile_order::hnd)));
    check<opened<128>>(of(lane_of(KV_FORMAT_Q4_0, KV_FORMAT_Q4_0, 72, 104, tile_order::nhd)));
    check<opened<64>>(
        of(lane_of(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN, 64, 64, tile_order::nhd)));
}

TEST_CASE("attend opened: windows, sinks, soft-caps, slopes, and values that are no numbers") {
    attend_case test{lane_of(KV_FORMAT_Q8_0, KV_FORMAT_Q8_0), number::f16, number::f32, 4};
    test.window = 21;
    test.window_sinks = 5;
    test.sinks = true;
    test.softcap = 3.0f;
    check<opened<64>>(test);
    if (few_cases) return;
    test.slopes = true;
    check<opened<64>>(test);
    attend_case spoiled{lane_of(KV_FORMAT_F32, KV_FORMAT_F32), number::f16, number::f32, 4};
    spoiled.spoiled_slots = 3;
    check<opened<64>>(spoiled);
}

TEST_CASE("attend opened: numbers that f16 does not hold") {
    any_storage here({lane_of(KV_FORMAT_F32, KV_FORMAT_F32), number::f32, number::f32, 4},
                     {{33, 1}, {40, 9}});
    for (uint32_t s = 0; s < 2; ++s) {
        const uint32_t slots = here.sequences[s].slots;
        device_tensor keys(number::f32, slots, 2, 64), values(number::f32, slots, 2, 64);
        keys.fill(5 + s, 1e-20f);
        values.fill(7 + s, 1e30f);
        here.write(s, keys, values);
    }
    here.queries().fill(9, 1e20f);
    here.run<opened<64>, opened<64>>(tested_orders[0]);
    CHECK(here.error() < f16_bound);
}

TEST_CASE("attend: rows that are stored in another basis, opened or not") {
    attend_case test{lane_of(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN), number::f16, number::f16,
                     4};
    test.lane.rotate = true;
    check<bytes<64>>(test);
    if (few_cases) return;
    test.lane = lane_of(KV_FORMAT_INT4_TOKEN, KV_FORMAT_INT4_TOKEN, 72, 120);
    test.lane.rotate = true;
    test.out = number::f32;
    check<nibbles<128>>(test);
    check<opened<128>>(test);
    test.lane = lane_of(KV_FORMAT_F16, KV_FORMAT_F16, 96, 96);
    test.lane.rotate = true;
    test.query_heads = 18;  // more than a tile of vectors
    check<half<number::f16, 128>>(test);
}

TEST_CASE("attend: older blocks in tiles, or demoted, the others as they are written") {
    attend_case test{lane_of(KV_FORMAT_F16, KV_FORMAT_F16), number::f16, number::f32, 4};
    test.lane.block_tokens = 32;
    test.sealed_keys = test.sealed_values = KV_FORMAT_KIVI4;
    check<half<number::f16, 64>, opened<64>>(test);
    if (few_cases) return;
    test.sealed_keys = test.sealed_values = KV_FORMAT_KIVI2;
    test.window = 50;
    test.window_sinks = 3;
    check<half<number::f16, 64>, opened<64>>(test);
    test.window = test.window_sinks = 0;
    test.lane.key_dim = 128;
    test.lane.value_dim = 72;
    test.lane.rotate = true;
    test.sealed_keys = test.sealed_values = KV_FORMAT_KVARN4;
    check<half<number::f16, 128>, opened<128>>(test);
    test.sealed_keys = test.sealed_values = KV_FORMAT_KVARN2;
    check<half<number::f16, 128>, opened<128>>(test);
    test.lane.rotate = false;
    test.lane.block_tokens = 16;
    test.sealed_keys = test.sealed_values = KV_FORMAT_INT4_TOKEN;
    check<half<number::f16, 128>, nibbles<128>>(test);
}

TEST_CASE("attend opened: shared memory fits a multiprocessor of sm_80 at the widest rows") {
    constexpr uint32_t most = 163 << 10;
    const lane wide(lane_of(KV_FORMAT_Q8_0, KV_FORMAT_Q8_0, 256, 256), 1, 1);
    CHECK(kernels::attend_memory<opened<256>>::bytes(wide.place) <= most);
    CHECK(kernels::rows_memory<opened<256>>::bytes(wide.place) <= most);
}
