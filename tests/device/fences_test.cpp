// Fences: a step has passed when the device says so, and nobody waits for it.
#include "driver/fences.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "fake_driver.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

bool message_has(const char* part) {
    return std::string(message_buffer()).find(part) != std::string::npos;
}

/// A device with fences whose host has a context of its own current, and two streams.
struct world {
    fake_driver fake;
    device_context device;
    std::unique_ptr<fence_ring> fences = std::make_unique<fence_ring>();
    stream_handle stream = fake.make_stream();
    stream_handle other = fake.make_stream();
    context_handle own = fake.make_context("the host's");

    world() {
        fake.set_current(own);
        REQUIRE(device.open(fake.table(), 0) == KV_OK);
        REQUIRE(fences->create(device) == KV_OK);
    }
    /// Nothing that the test did not ask for.
    ~world() {
        CHECK(fake.violations.empty());
        CHECK(fake.current() == own);
        CHECK(fake.capture_mode() == 0);
    }
};

}  // namespace

TEST_CASE("a step passes when the device has come to its end, not before") {
    world of;
    CHECK(of.fences->passed(1));  // it has enqueued nothing
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    CHECK_FALSE(of.fences->passed(1));
    of.fake.run_all();
    CHECK(of.fences->poll() == KV_OK);
    CHECK_FALSE(of.fences->passed(1));  // it may enqueue more

    REQUIRE(of.fences->record(1) == KV_OK);
    CHECK(of.fences->poll() == KV_OK);
    CHECK_FALSE(of.fences->passed(1));
    of.fake.run_all();
    CHECK_FALSE(of.fences->passed(1));
    CHECK(of.fences->poll() == KV_OK);
    CHECK(of.fences->passed(1));
    CHECK(of.fences->in_flight() == 0);
    CHECK(of.fences->record(2) == KV_OK);  // never begun
    CHECK(of.fences->passed(2));
    CHECK(of.fake.synchronisations() == 0);
}

TEST_CASE("a step on another stream waits for those before it") {
    world of;
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    CHECK(of.fences->begin(2, of.other) == KV_INVALID);
    CHECK(message_has("step 1"));
    CHECK(of.fences->begin(1, of.other) == KV_INVALID);
    REQUIRE(of.fences->begin(2, of.stream) == KV_OK);
    REQUIRE(of.fences->record(2) == KV_OK);
    REQUIRE(of.fences->record(1) == KV_OK);

    of.fake.block(of.stream);
    REQUIRE(of.fences->begin(3, of.other) == KV_OK);
    REQUIRE(of.fences->record(3) == KV_OK);
    of.fake.run_all();
    CHECK(of.fences->poll() == KV_OK);
    CHECK_FALSE(of.fences->passed(1));
    CHECK_FALSE(of.fences->passed(2));
    CHECK_FALSE(of.fences->passed(3));
    of.fake.unblock(of.stream);
    of.fake.run_all();
    CHECK(of.fences->poll() == KV_OK);
    CHECK(of.fences->passed(3));
    CHECK(of.fences->in_flight() == 0);
}

TEST_CASE("what has begun by now, whatever begins later") {
    world of;
    REQUIRE(of.fences->begin(5, of.stream) == KV_OK);
    const uint64_t then = of.fences->newest();
    CHECK_FALSE(of.fences->passed_all(then));
    REQUIRE(of.fences->record(5) == KV_OK);
    of.fake.run_all();
    REQUIRE(of.fences->begin(6, of.stream) == KV_OK);
    REQUIRE(of.fences->poll() == KV_OK);
    CHECK(of.fences->passed_all(then));
    CHECK_FALSE(of.fences->passed_all(of.fences->newest()));
}

TEST_CASE("too many steps in flight: again, and none is lost") {
    world of;
    for (uint64_t step = 1; step <= fence_ring::capacity; ++step) {
        REQUIRE(of.fences->begin(step, of.stream) == KV_OK);
        REQUIRE(of.fences->record(step) == KV_OK);
    }
    CHECK(of.fences->begin(100, of.stream) == KV_AGAIN);
    CHECK(of.fences->passed(100));
    for (uint64_t step = 1; step <= 3; ++step) REQUIRE(of.fake.run_one(of.stream));
    CHECK(of.fences->begin(100, of.stream) == KV_OK);
    CHECK(of.fences->in_flight() == fence_ring::capacity - 2);
    for (uint64_t step = 1; step <= fence_ring::capacity; ++step) {
        CHECK(of.fences->passed(step) == (step <= 3));
    }
    CHECK(of.fake.synchronisations() == 0);
}

TEST_CASE("the default stream is refused") {
    world of;
    for (const uintptr_t implicit : {0, 1, 2}) {
        CHECK(of.fences->begin(1, reinterpret_cast<stream_handle>(implicit)) == KV_INVALID);
        CHECK(message_has("default stream"));
    }
    CHECK(of.fences->in_flight() == 0);
}

TEST_CASE("steps begin and end outside of captures, and others' captures go on") {
    world of;
    of.fake.begin_capture(of.stream);
    CHECK(of.fences->begin(1, of.stream) == KV_INVALID);
    CHECK(message_has("captured"));
    CHECK(of.fences->begin(1, of.other) == KV_OK);
    CHECK(of.fences->record(1) == KV_OK);
    of.fake.run_all();
    CHECK(of.fences->poll() == KV_OK);  // asks for an event while somebody captures
    CHECK(of.fences->passed(1));
    CHECK(of.fake.end_capture(of.stream).empty());

    REQUIRE(of.fences->begin(2, of.stream) == KV_OK);
    of.fake.begin_capture(of.stream);
    CHECK(of.fences->record(2) == KV_INVALID);
    CHECK(of.fake.end_capture(of.stream).empty());
    CHECK_FALSE(of.fences->passed(2));
    CHECK(of.fences->record(2) == KV_OK);
}

TEST_CASE("after a fault nothing passes") {
    world of;
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    REQUIRE(of.fences->record(1) == KV_OK);
    of.fake.inject("cuEventQuery", error_illegal_address);
    CHECK(of.fences->poll() == KV_DEVICE);
    CHECK(message_has("CUDA_ERROR_ILLEGAL_ADDRESS"));
    CHECK(of.fences->poll() == KV_DEVICE);
    CHECK(of.fences->begin(2, of.stream) == KV_DEVICE);
    CHECK(message_has("failed earlier"));
    CHECK_FALSE(of.fences->passed(1));
}

TEST_CASE("the end waits for what is in flight, and leaves nothing behind") {
    world of;
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    REQUIRE(of.fences->record(1) == KV_OK);
    REQUIRE(of.fences->begin(2, of.stream) == KV_OK);  // open still
    device_pointer memory = 0;
    {
        const current_context here(of.device);
        REQUIRE(of.fake.table().memory_allocate(&memory, 64) == success);
        REQUIRE(of.fake.table().fill_bytes(memory, 1, 64, of.stream) == success);
    }
    CHECK(of.fake.waiting(of.stream) == 2);
    of.fences.reset();
    CHECK(of.fake.waiting(of.stream) == 0);
    CHECK(of.fake.synchronisations() == 2);
    CHECK(*of.fake.memory_of<uint8_t>(memory) == 1);
    CHECK(of.fake.table().memory_free(memory) == success);
    CHECK(of.fake.leaks().size() == 1);  // the context, which the device has
}

TEST_CASE("half created is let go") {
    fake_driver fake;
    {
        device_context device;
        REQUIRE(device.open(fake.table(), 0) == KV_OK);
        fence_ring fences;
        fake.inject("cuEventCreate", error_out_of_memory, 10);
        CHECK(fences.create(device) == KV_NO_MEMORY);
    }
    CHECK(fake.leaks().empty());
    CHECK(fake.violations.empty());
}

TEST_CASE("a step that has ended goes on: it has passed once what came then is done, too") {
    world here;
    REQUIRE(here.fences->begin(1, here.stream) == KV_OK);
    REQUIRE(here.fences->record(1) == KV_OK);
    here.fake.run_all();
    CHECK(here.fences->go_on(1, here.other) == KV_OK);
    CHECK(here.fences->stream_of(1) == here.stream);  // as before
    REQUIRE(here.fences->poll() == KV_OK);
    CHECK_FALSE(here.fences->passed(1));  // it may enqueue more
    REQUIRE(here.fences->record(1) == KV_OK);
    REQUIRE(here.fences->poll() == KV_OK);
    CHECK_FALSE(here.fences->passed(1));
    here.fake.run_all();
    REQUIRE(here.fences->poll() == KV_OK);
    CHECK(here.fences->passed(1));
}

TEST_CASE("a step without a stream begins on that of an open one, else on what is there for it") {
    world here;
    CHECK(here.fences->go_on(1, here.other) == KV_OK);
    CHECK(here.fences->stream_of(1) == here.other);
    REQUIRE(here.fences->record(1) == KV_OK);
    REQUIRE(here.fences->begin(2, here.stream) == KV_OK);  // behind it
    CHECK(here.fences->go_on(3, here.other) == KV_OK);
    CHECK(here.fences->stream_of(3) == here.stream);
    REQUIRE(here.fences->record(3) == KV_OK);
    here.fake.begin_capture(here.stream);
    CHECK(here.fences->go_on(3, here.other) == KV_INVALID);
    CHECK(message_has("captured"));
    (void)here.fake.end_capture(here.stream);
    REQUIRE(here.fences->record(2) == KV_OK);
}

TEST_CASE("a step that goes on is behind those that began later on other streams, too") {
    world here;
    REQUIRE(here.fences->begin(1, here.stream) == KV_OK);
    REQUIRE(here.fences->record(1) == KV_OK);
    REQUIRE(here.fences->begin(2, here.other) == KV_OK);
    CHECK(here.fences->go_on(1, here.stream) == KV_INVALID);  // which has not ended
    CHECK(message_has("step 2"));
    REQUIRE(here.fences->record(2) == KV_OK);
    here.fake.run_all();
    REQUIRE(here.fences->poll() == KV_OK);
    for (const bool later : {false, true}) {
        CAPTURE(later);
        const uint64_t first = later ? 5 : 3, second = first + 1;
        REQUIRE(here.fences->begin(first, here.stream) == KV_OK);
        REQUIRE(here.fences->record(first) == KV_OK);
        REQUIRE(here.fences->begin(second, here.other) == KV_OK);
        REQUIRE(here.fences->record(second) == KV_OK);
        here.fake.run_all();
        here.fake.block(here.other);
        REQUIRE(here.fences->go_on(second, here.other) == KV_OK);
        REQUIRE(here.fences->record(second) == KV_OK);  // which the device cannot reach now
        if (later) {
            REQUIRE(here.fences->go_on(first, here.stream) == KV_OK);
            REQUIRE(here.fences->record(first) == KV_OK);
        }
        here.fake.run_all();
        REQUIRE(here.fences->poll() == KV_OK);
        CHECK(here.fences->passed(first) == !later);
        here.fake.unblock(here.other);
        here.fake.run_all();
        REQUIRE(here.fences->poll() == KV_OK);
        CHECK(here.fences->passed(first));
    }
}
