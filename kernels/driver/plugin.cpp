// The plugin: what libkvrt.so loads as libkvrt_cuda.so, a table of functions over one device.
#include "device/plugin.h"

#include <new>

#include "driver/arena.hpp"
#include "driver/attend_plan.hpp"
#include "driver/buffer.hpp"
#include "driver/counters.hpp"
#include "driver/description.hpp"
#include "driver/fills.hpp"
#include "driver/gather.hpp"
#include "driver/give.hpp"
#include "driver/observe.hpp"
#include "driver/rounds.hpp"
#include "driver/table.hpp"
#include "driver/verbs.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

/// Members end in the order that work in flight needs: fences wait for it, then memory goes.
struct kvrt_device {
    host_allocator allocator;
    device_context context;
    kernel_functions functions;
    device_buffer workspace;
    observed_sums sums;
    counter_array counters;
    arena_memory arena;
    device_table table;
    staging_ring staging;
    round_runner rounds;
    query_gatherer queries;
    score_giver given;
    block_fills fills;
    fence_ring fences;

    explicit kvrt_device(const kvrt_device_options& options)
        : arena(context, fences, allocator, options.elastic != 0) {
        allocator.user = options.allocator;
        allocator.allocate = options.allocate;
        allocator.release = options.release;
        context.use_hooks({options.device_user, options.allocate_device, options.release_device});
    }
    device_pointer at(uint64_t offset) const { return arena.base() + offset; }
};

namespace {

kv_status describe(kvrt_device_description* description) {
    const driver* calls = nullptr;
    KVRT_TRY(load_driver(calls));
    return describe_current(*calls, *description);
}

kv_status open(const kvrt_device_options* options, kvrt_device** out_device) {
    *out_device = nullptr;
    if (options->struct_size < sizeof *options) {
        return fail(KV_INTERNAL, "options of a device: {} bytes of {}", options->struct_size,
                    sizeof *options);
    }
    const driver* calls = nullptr;
    KVRT_TRY(load_driver(calls));
    host_allocator allocator;
    allocator.user = options->allocator;
    allocator.allocate = options->allocate;
    allocator.release = options->release;
    void* memory =
        allocate(allocator, sizeof(kvrt_device), alignof(kvrt_device), memory_contents::zeroed);
    if (memory == nullptr) {
        return fail(KV_NO_MEMORY, "the allocator refused {} bytes for the device",
                    sizeof(kvrt_device));
    }
    kvrt_device* device = new (memory) kvrt_device(*options);
    status verdict = device->context.open(*calls, current_device(*calls));
    if (verdict == KV_OK) verdict = device->functions.load(device->context);
    if (verdict == KV_OK) verdict = device->fences.create(device->context);
    if (verdict == KV_OK) {
        *out_device = device;
        return KV_OK;
    }
    device->~kvrt_device();
    release(allocator, memory, sizeof(kvrt_device), alignof(kvrt_device));
    return verdict;
}

void close(kvrt_device* device) {
    host_allocator allocator = device->allocator;
    device->~kvrt_device();
    release(allocator, device, sizeof(kvrt_device), alignof(kvrt_device));
}

kv_status reserve(kvrt_device* device, uint64_t bytes, uint64_t alignment, void** out_base) {
    std::byte* base = nullptr;
    const status verdict = device->arena.reserve(bytes, alignment, &base);
    *out_base = base;
    return verdict;
}

/// Of an open step, which is behind all that blocks were filled with.
status find_stream(kvrt_device* device, uint64_t step, stream_handle& stream) {
    stream = device->fences.stream_of(step);
    if (stream == nullptr) return fail(KV_INTERNAL, "step {} has no stream", step);
    return device->fills.settle(stream);
}

/// What is filled must not be unmapped before that, and no step may know of it.
void give_back(kvrt_device* device, uint64_t offset, uint64_t bytes) {
    (void)device->fills.wait();
    device->arena.give_back(offset, bytes);
}

void fill(kvrt_device* device, uint64_t offset, uint64_t bytes, uint32_t value) {
    device->fills.fill(device->context, device->at(offset), bytes, value);
}

kv_status read(kvrt_device* device, uint64_t first, uint64_t stride, uint64_t count, uint64_t bytes,
               void* out) {
    return device->fills.read(device->context, device->at(first), stride, count, bytes,
                              static_cast<std::byte*>(out));
}

kv_status poll(kvrt_device* device) {
    const status verdict = device->fences.poll();
    if (verdict == KV_OK) device->arena.collect();
    return verdict;
}

kv_status copy(kvrt_device* device, uint64_t step, uint64_t target, uint64_t source,
               uint64_t bytes) {
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    const current_context here(device->context);
    KVRT_TRY(here.state());
    return device->context.check(device->context.calls().copy_on_device(
                                     device->at(target), device->at(source), bytes, stream),
                                 "cuMemcpyDtoDAsync");
}

kv_status create_table(kvrt_device* device, uint64_t words, uint64_t staging_bytes,
                       void** out_address, const uint32_t** out_image) {
    KVRT_TRY(device->staging.create(device->context, staging_bytes));
    // Without the kernel, every run of lines is a copy.
    KVRT_TRY(device->table.create(device->context, device->allocator, words,
                                  device->functions.spread().handle));
    *out_address = reinterpret_cast<void*>(device->table.address());
    *out_image = device->table.words_at(0);
    return KV_OK;
}

kv_status upload_table(kvrt_device* device, uint64_t step) {
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return device->table.upload(device->staging, stream);
}

kv_status share_plans(kvrt_device* device, uint64_t step, const kvrt_share_plans* call) {
    KVRT_TRY(device->functions.state());
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return launch_share(device->functions, stream, device->table.address(), *call);
}

kv_status create_workspace(kvrt_device* device, uint64_t bytes, void** out_address) {
    KVRT_TRY(device->workspace.allocate(device->context, bytes));
    *out_address = reinterpret_cast<void*>(device->workspace.address());
    return KV_OK;
}

kv_status create_sums(kvrt_device* device, kvrt_sums_memory* memory) {
    return device->sums.create(device->context, *memory);
}

kv_status write_rows(kvrt_device* device, uint64_t step, const kvrt_write_rows* call) {
    KVRT_TRY(device->functions.state());
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return launch_write(device->functions, stream, *call);
}

kv_status seal_blocks(kvrt_device* device, uint64_t step, const kvrt_seal_blocks* call) {
    KVRT_TRY(device->functions.state());
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    const current_context here(device->context);
    KVRT_TRY(here.state());
    KVRT_TRY(check_stream(device->context, stream, "sealing"));
    return launch_seal(device->functions, stream, *call);
}

kv_status create_counters(kvrt_device* device, uint64_t count, uint64_t** out_address) {
    KVRT_TRY(device->counters.create(device->context, count));
    *out_address = reinterpret_cast<uint64_t*>(device->counters.address());
    return KV_OK;
}

kv_status fetch_counters(kvrt_device* device, uint64_t step) {
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return device->counters.fetch(step, stream);
}

kv_status begin_step(kvrt_device* device, uint64_t step, void* stream) {
    KVRT_TRY(device->fences.begin(step, static_cast<stream_handle>(stream)));
    status verdict = device->counters.begin(static_cast<stream_handle>(stream));
    if (verdict == KV_OK) verdict = device->sums.begin(static_cast<stream_handle>(stream));
    if (verdict < 0) (void)device->fences.record(step);  // it has nothing more to enqueue
    return verdict;
}

kv_status attend_rows(kvrt_device* device, uint64_t step, kvrt_attend_rows* call) {
    KVRT_TRY(device->functions.state());
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    const current_context here(device->context);
    KVRT_TRY(here.state());
    int capture = capture_none;
    KVRT_TRY(device->context.check(device->context.calls().stream_is_capturing(stream, &capture),
                                   "cuStreamIsCapturing"));
    call->captured = capture != capture_none ? 1 : 0;
    return launch_attend(device->functions, stream, call->captured != 0, *call);
}

kv_status create_rounds(kvrt_device* device, kvrt_round_memory* memory) {
    return device->rounds.create(device->context, device->functions, *memory);
}

kv_status create_queries(kvrt_device* device, uint64_t places, kvrt_query_memory* memory) {
    return device->queries.create(device->context, device->functions, places, *memory);
}

kv_status gather_queries(kvrt_device* device, uint64_t step, kvrt_gather_queries* call) {
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    const current_context here(device->context);
    KVRT_TRY(here.state());
    int capture = capture_none;
    KVRT_TRY(device->context.check(device->context.calls().stream_is_capturing(stream, &capture),
                                   "cuStreamIsCapturing"));
    call->captured = capture != capture_none ? 1 : 0;
    if (call->captured == 0 && call->gathers == 0) return KV_OK;
    return device->queries.run(device->functions, stream, *call);
}

kv_status create_given(kvrt_device* device, uint64_t bytes) {
    return device->given.create(device->context, device->functions, bytes);
}

kv_status give_scores(kvrt_device* device, uint64_t step, const kvrt_given_scores* call) {
    KVRT_TRY(device->functions.state());
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return device->given.run(device->functions, stream, *call);
}

kv_status open_round(kvrt_device* device, uint64_t step) {
    return device->fences.go_on(step, device->rounds.stream());
}

kv_status run_round(kvrt_device* device, uint64_t step, kvrt_round* call) {
    KVRT_TRY(device->functions.state());
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return device->rounds.run(stream, *call);
}

kv_status read_words(kvrt_device* device, uint64_t step, const kvrt_words* pieces, uint64_t count,
                     uint32_t* out) {
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    return device->rounds.read(stream, pieces, count, out);
}

kv_status copy_words(kvrt_device* device, uint64_t step, uint32_t* target, const uint32_t* source,
                     uint64_t words) {
    stream_handle stream = nullptr;
    KVRT_TRY(find_stream(device, step, stream));
    const current_context here(device->context);
    KVRT_TRY(here.state());
    return device->context.check(
        device->context.calls().copy_on_device(reinterpret_cast<device_pointer>(target),
                                               reinterpret_cast<device_pointer>(source),
                                               words * sizeof(uint32_t), stream),
        "cuMemcpyDtoDAsync (positions)");
}

const kvrt_plugin plugin = {
    .struct_size = sizeof(kvrt_plugin),
    .version = KVRT_PLUGIN_VERSION,
    .last_message = []() -> const char* { return message_buffer(); },
    .describe = describe,
    .open = open,
    .close = close,
    .reserve = reserve,
    .commit = [](kvrt_device* device, uint64_t offset,
                 uint64_t bytes) { return device->arena.commit(offset, bytes); },
    .give_back = give_back,
    .mapped_bytes = [](const kvrt_device* device) { return device->arena.mapped_bytes(); },
    .begin_step = begin_step,
    .end_step = [](kvrt_device* device, uint64_t step) { return device->fences.record(step); },
    .poll = poll,
    .passed = [](const kvrt_device* device, uint64_t step) -> int32_t {
        return device->fences.passed(step) ? 1 : 0;
    },
    .copy = copy,
    .create_table = create_table,
    .write_table = [](kvrt_device* device, uint64_t first, const uint32_t* words,
                      uint64_t count) { device->table.write(first, words, count); },
    .forget_table = [](kvrt_device* device, uint64_t first,
                       uint64_t count) { device->table.forget(first, count); },
    .upload_table = upload_table,
    .kernels = [](const kvrt_device* device) { return device->functions.state(); },
    .bound_attention = [](kvrt_attend_bounds* bounds) { bound_attention(*bounds); },
    .plan_attention = [](kvrt_attend_plan* plan) { plan_attention(*plan); },
    .advance_attention = [](kvrt_device* device, const kvrt_attend_plan* plan, uint64_t sequences)
        -> uint32_t { return advance_attention(*plan, device->table, sequences) ? 1 : 0; },
    .share_plans = share_plans,
    .create_workspace = create_workspace,
    .create_sums = create_sums,
    .write_rows = write_rows,
    .attend_rows = attend_rows,
    .create_rounds = create_rounds,
    .check_round = [](kvrt_device* device, const kvrt_lane* lane, const kvrt_lane* sealed,
                      uint32_t scorer) { return device->rounds.check(*lane, sealed, scorer); },
    .create_opened = [](kvrt_device* device,
                        uint64_t bytes) { return device->rounds.create_opened(bytes); },
    .open_round = open_round,
    .run_round = run_round,
    .read_words = read_words,
    .copy_words = copy_words,
    .create_queries = create_queries,
    .gather_queries = gather_queries,
    .seal_blocks = seal_blocks,
    .create_counters = create_counters,
    .fetch_counters = fetch_counters,
    .arrived_counters =
        [](kvrt_device* device) { return device->counters.arrived(device->fences); },
    .check_value_ranges =
        [](kvrt_device* device, const kvrt_lane* lane, const kvrt_lane* sealed) {
            return device->rounds.check_ranges(*lane, sealed);
        },
    .set_scoring =
        [](kvrt_device* device, const kvrt_scoring* wanted) {
            return device->rounds.triattention().set(device->context, device->functions, *wanted);
        },
    .report_scoring =
        [](const kvrt_device* device, kvrt_scoring_report* report) {
            device->rounds.triattention().report(*report);
        },
    .create_given = create_given,
    .give_scores = give_scores,
    .fill = fill,
    .read = read,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const kvrt_plugin* kvrt_cuda_plugin(void) {
    return &plugin;
}
