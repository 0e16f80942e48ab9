// kv_write and kv_attend of a CUDA pool, through the public header: the plugin's launches run the
// kernels' own bodies, late, and a CPU pool says what is right.
#include "driver/verbs.hpp"

#include <algorithm>

#include "twin_cases.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

/// What `drive` finds; violations are taken for found, too.
uint64_t faults_found(twin_pools& pools) {
    drive(pools, 4);
    const uint64_t found = pools.differences + pools.host.fake.violations.size();
    pools.host.fake.violations.clear();
    return found;
}

}  // namespace

TEST_CASE("a CUDA pool writes and attends as a CPU pool does, however late the device is") {
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        CAPTURE(flags);
        twin_pools pools(flags);
        drive(pools, 8);
        CHECK(pools.differences == 0);
        CHECK(pools.compared_words > 10000);
        CHECK(pools.compared_outputs > 100);
        CHECK(pools.host.fake.calls("cuLaunchKernel") > 100);
        CHECK(pools.host.fake.synchronisations() == 0);
    }
}

TEST_CASE("steps at random store and attend as on the CPU") {
    twin_pools pools(KV_POOL_ELASTIC);
    pools.random.seed(5);
    drive_at_random(pools, 12);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_outputs > 50);
}

TEST_CASE("layouts that foreign kernels read are written and attended to, too") {
    for (const uint32_t layout : {KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        CAPTURE(layout);
        twin_pools pools(0, layout);
        drive(pools, 3);
        CHECK(pools.differences == 0);
    }
}

TEST_CASE("what a wrong launch would do is found by the comparison with the CPU pool") {
    twin_pools pools;
    uint32_t number = 0;
    SUBCASE("none") { number = 1; }
    SUBCASE("rows are written beside their place") {
        pools.faults.write = [&](kernels::write_parameters& call) {
            if (call.place.keys.codes == kernels::coding::plain && ++number == 3) {
                call.place.values.slot_stride += 8;
            }
        };
    }
    SUBCASE("a tensor's rows are strided otherwise") {
        pools.faults.write = [&](kernels::write_parameters& call) {
            if (++number == 9) call.keys.row_stride -= 1;
        };
    }
    SUBCASE("static scales of another head") {
        pools.faults.write = [&](kernels::write_parameters& call) {
            if (call.place.keys.scales != nullptr && ++number == 2) ++call.place.keys.scales;
        };
    }
    SUBCASE("ids of blocks are not shifted") {
        pools.faults.attend = [&](kernels::attend_parameters& call) {
            if (++number == 12) call.tables.shift = 0;
        };
    }
    SUBCASE("no window") {
        pools.faults.attend = [&](kernels::attend_parameters& call) {
            number += call.window ? 1 : 0;
            call.window = false;
        };
    }
    SUBCASE("a stale table") {
        pools.faults.spread = [&](kernels::spread_parameters&) { return ++number != 3; };
    }
    SUBCASE("a plan that is not copied to other lanes") {
        pools.faults.share = [&](kernels::share_parameters& call) {
            if (++number == 3) call.share_count = 0;
        };
    }
    const bool intact =
        !pools.faults.write && !pools.faults.attend && !pools.faults.spread && !pools.faults.share;
    CHECK((faults_found(pools) == 0) == intact);
    CHECK(number != 0);
}

TEST_CASE("what kernels do not do is refused by name, and nothing has changed") {
    twin_pools pools;
    twin_sequence sequence = pools.create();
    kv_step* steps[2];
    const std::vector<twin_append> items = {{&sequence, 200, 200}};
    pools.begin(items, steps);
    twin_tensor keys = pools.make_tensor(200, 2, 64), values = pools.make_tensor(200, 2, 64);
    twin_tensor queries = pools.make_tensor(200, 4, 64), out = pools.make_tensor(200, 4, 64);
    SUBCASE("tensors of two types") {
        values.on_device.dtype = KV_DTYPE_F16;
        CHECK(kv_write(steps[0], 0, &keys.on_device, &values.on_device) == KV_UNSUPPORTED);
        CHECK(message_has("dtype"));
    }
    SUBCASE("attention before the write") {
        CHECK(kv_attend(steps[0], 0, &queries.on_device, &out.on_device, nullptr) == KV_INVALID);
        CHECK(message_has("kv_write"));
    }
    CHECK(pools.host.fake.calls("cuLaunchKernel") <= 2);  // of the tables
    for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("formats and layouts that no kernel knows are named") {
    kvrt_lane lane = {};
    lane.order = KV_LAYOUT_HND;
    lane.keys.format = 4711;
    lane.keys.kind = static_cast<uint32_t>(format_class::token_local);
    lane.values = lane.keys;
    lane.values.format = KV_FORMAT_INT8_TOKEN;
    kernels::block_place place;
    CHECK(describe_lane(lane, "kv_some", place) == KV_UNSUPPORTED);
    CHECK(message_has("kv_some: keys of KV_FORMAT 4711"));
    lane.keys.format = KV_FORMAT_INT8_TOKEN;
    CHECK(describe_lane(lane, "kv_some", place) == KV_OK);

    // Read in no kernel.
    kernel_functions functions;
    lane.keys.format = KV_FORMAT_AFFINE4;
    for (kvrt_operand* operand : {&lane.keys, &lane.values}) {
        operand->dim = 64;
        operand->words = 17;
        operand->word_bytes = 4;
        operand->slot_stride = 17;
        operand->word_stride = 1;
    }
    kvrt_attend_rows rows = {};
    rows.lane = &lane;
    CHECK(launch_attend(functions, nullptr, false, rows) == KV_UNSUPPORTED);
    CHECK(message_has("kv_attend: keys of KV_FORMAT"));
    CHECK(message_has("in layout 1"));
}

TEST_CASE("without kernels in the plugin, verbs say how to get them") {
    cuda_host host;
    const cuda_pool pool(small_config());
    const kv_seq seq = pool.create_sequence();
    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, 1, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    float number[128] = {};  // never followed
    kv_tensor tensor = KV_INIT(kv_tensor);
    tensor.data = number;
    tensor.dtype = KV_DTYPE_F32;
    tensor.rows = 1;
    tensor.heads = 2;
    tensor.dim = 64;
    CHECK(kv_write(step, 0, &tensor, &tensor) == KV_UNSUPPORTED);
    CHECK(message_has("scripts/fetch_cuda.sh"));
    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
    REQUIRE(kv_cuda_step_tables(step, 0, &tables) == KV_OK);
    CHECK(kv_attend(step, 0, &tensor, &tensor, nullptr) == KV_UNSUPPORTED);
    CHECK(message_has("scripts/fetch_cuda.sh"));
    REQUIRE(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("a device that the plugin has no code for keeps its pools, without kernels") {
    const with_images images;
    cuda_host host;
    host.fake.inject("cuModuleLoadData", error_no_binary_for_device);
    const cuda_pool pool(small_config());
    const kv_seq seq = pool.create_sequence();
    CHECK(append(pool, host.stream, seq, 3) == KV_OK);
    // One whose kernels are another release's is an error.
    kv_pool* other = nullptr;
    const small_model model;
    const kv_pool_config config = small_config();
    CHECK(kv_pool_create(&config, &model.description, &other) == KV_INTERNAL);
    CHECK(message_has("kvrt_"));
}

TEST_CASE("a launch that fails is told with the kernel's name, and then with every call") {
    twin_pools pools;
    twin_sequence sequence = pools.create();
    kv_step* steps[2];
    pools.begin({{&sequence, 3, 3}}, steps);
    twin_tensor keys = pools.make_tensor(3, 2, 64);
    const uint64_t before = pools.host.fake.calls("cuLaunchKernel");
    pools.host.fake.inject("cuLaunchKernel", error_launch_failed);
    CHECK(kv_write(steps[0], 0, &keys.on_device, &keys.on_device) == KV_DEVICE);
    CHECK(message_has("kvrt_write_f32: CUDA_ERROR_LAUNCH_FAILED"));
    CHECK(kv_write(steps[0], 1, &keys.on_device, &keys.on_device) == KV_DEVICE);
    CHECK(message_has("kvrt_write_f32"));
    CHECK(pools.host.fake.calls("cuLaunchKernel") == before + 1);
    for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
    pools.host.fake.violations.clear();
}
