// Loading the driver, and the device's context: current for the length of a call, lost with its
// first fault.
#include <doctest/doctest.h>

#include <string>

#include "driver/context.hpp"
#include "fake_driver.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

std::string message() { return message_buffer(); }

bool contains(const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
}

/// A library that has all symbols but one.
const char* missing_symbol = "";
void* find_all_but_one(void* library, const char* symbol) {
    return std::string(symbol) == missing_symbol ? nullptr : library;
}

}  // namespace

TEST_CASE("a driver without a needed call is not used, and says which") {
    int library = 0;
    driver table;
    missing_symbol = "";
    CHECK(fill_driver(&library, find_all_but_one, table) == KV_OK);
    CHECK(table.has_virtual_memory());
    CHECK(reinterpret_cast<void*>(table.launch) == &library);

    missing_symbol = "cuLaunchKernel";
    CHECK(fill_driver(&library, find_all_but_one, table) == KV_UNSUPPORTED);
    CHECK(contains(message(), "cuLaunchKernel"));

    missing_symbol = "cuMemMap";
    CHECK(fill_driver(&library, find_all_but_one, table) == KV_OK);
    CHECK_FALSE(table.has_virtual_memory());
    CHECK_FALSE(static_cast<bool>(table.memory_set_access));
}

TEST_CASE("the machine's driver: there, or a message that says why not") {
    const driver* table = nullptr;
    const status verdict = load_driver(table);
    if (verdict == KV_OK) {
        MESSAGE("this machine has a CUDA driver");
        CHECK(static_cast<bool>(table->launch));
        return;
    }
    CHECK(verdict == KV_UNSUPPORTED);
    CHECK(message().size() > 20);
    MESSAGE("no driver here: ", message());
}

TEST_CASE("a driver that does not start, or has no device, is unsupported") {
    fake_driver fake;
    CHECK(initialise(fake.table()) == KV_OK);
    fake.inject("cuInit", error_no_device);
    CHECK(initialise(fake.table()) == KV_UNSUPPORTED);
    CHECK(contains(message(), "CUDA_ERROR_NO_DEVICE"));
}

TEST_CASE("no device: unsupported") {
    fake_driver::options none;
    none.devices = 0;
    fake_driver fake(none);
    CHECK(initialise(fake.table()) == KV_UNSUPPORTED);
    device_context device;
    CHECK(device.open(fake.table(), 0) == KV_UNSUPPORTED);
    CHECK(contains(message(), "device 0"));
}

TEST_CASE("the caller's context is current again after every call") {
    fake_driver fake;
    {
        device_context device;
        REQUIRE(device.open(fake.table(), 0) == KV_OK);
        CHECK(fake.current() == nullptr);
        {
            const current_context here(device);
            CHECK(here.state() == KV_OK);
            CHECK(fake.current() == fake.primary());
            CHECK(fake.capture_mode() == capture_mode_relaxed);
        }
        CHECK(fake.capture_mode() == 0);
        CHECK(fake.current() == nullptr);

        const context_handle own = fake.make_context("the caller's");
        fake.set_current(own);
        {
            const current_context here(device);
            CHECK(fake.current() == fake.primary());
            const current_context again(device);
            CHECK(fake.current() == fake.primary());
        }
        CHECK(fake.current() == own);
    }
    CHECK(fake.leaks().empty());
    CHECK(fake.violations.empty());
}

TEST_CASE("a fault stays, with the call and the error that it was") {
    fake_driver fake;
    device_context device;
    REQUIRE(device.open(fake.table(), 0) == KV_OK);
    CHECK(device.check(error_not_ready, "cuEventQuery") == KV_DEVICE);
    CHECK(device.healthy() == KV_OK);
    CHECK(device.check(error_out_of_memory, "cuMemCreate") == KV_NO_MEMORY);
    CHECK(contains(message(), "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK(device.healthy() == KV_OK);

    CHECK(device.check(error_illegal_address, "cuEventQuery") == KV_DEVICE);
    CHECK(device.check(error_launch_failed, "cuLaunchKernel") == KV_DEVICE);
    CHECK(device.healthy() == KV_DEVICE);
    CHECK(contains(message(), "cuEventQuery"));
    CHECK(contains(message(), "CUDA_ERROR_ILLEGAL_ADDRESS"));
    {
        const current_context here(device);
        CHECK(here.state() == KV_DEVICE);
        CHECK(fake.current() == fake.primary());  // so that things can be let go
    }
    CHECK(fake.current() == nullptr);
}

TEST_CASE("a context that cannot be made current is an error, and nothing is popped") {
    fake_driver fake;
    device_context device;
    REQUIRE(device.open(fake.table(), 0) == KV_OK);
    const context_handle own = fake.make_context("the caller's");
    fake.set_current(own);
    fake.inject("cuCtxPushCurrent_v2", error_invalid_context);
    {
        const current_context here(device);
        CHECK(here.state() == KV_DEVICE);
        CHECK(contains(message(), "CUDA_ERROR_INVALID_CONTEXT"));
    }
    CHECK(fake.current() == own);
}

TEST_CASE("the fake finds what callers of a driver get wrong") {
    fake_driver fake;
    device_context device;
    REQUIRE(device.open(fake.table(), 0) == KV_OK);
    const driver& table = fake.table();
    const stream_handle stream = fake.make_stream();
    std::byte* pinned = static_cast<std::byte*>(fake.make_pinned(64));
    device_pointer memory = 0;

    CHECK(table.memory_allocate(&memory, 64) == error_invalid_context);
    CHECK(fake.violations.size() == 1);
    fake.set_current(fake.primary());
    CHECK(table.memory_allocate(&memory, 64) == success);

    std::byte pageable[64] = {};
    CHECK(table.copy_to_device(memory, pageable, 64, stream) != success);
    CHECK(table.copy_to_device(memory, pinned, 64, nullptr) != success);
    CHECK(fake.violations.size() == 3);

    SUBCASE("memory that is overwritten before its copy has run") {
        CHECK(table.copy_to_device(memory, pinned, 64, stream) == success);
        pinned[3] = std::byte{9};
        CHECK(fake.violations.size() == 3);
        fake.run_all();
        REQUIRE(fake.violations.size() == 4);
        CHECK(contains(fake.violations.back(), "overwritten"));
    }
    SUBCASE("memory that is freed before its copy has run, and the fault stays") {
        CHECK(table.copy_to_device(memory, pinned, 64, stream) == success);
        CHECK(table.memory_free(memory) == success);
        fake.run_all();
        CHECK(contains(fake.violations.back(), "not mapped"));
        CHECK(table.memory_allocate(&memory, 64) == error_illegal_address);
    }
    SUBCASE("waiting for what never comes") {
        event_handle event = nullptr;
        CHECK(table.event_create(&event, event_disable_timing) == success);
        fake.block(stream);
        CHECK(table.event_record(event, stream) == success);
        CHECK(table.event_query(event) == error_not_ready);
        CHECK(table.event_synchronize(event) == error_unknown);
        CHECK(contains(fake.violations.back(), "for ever"));
        fake.unblock(stream);
        CHECK(table.event_synchronize(event) == success);
        CHECK(table.event_query(event) == success);
    }
    SUBCASE("an event asked for during a capture") {
        event_handle event = nullptr;
        CHECK(table.event_create(&event, event_disable_timing) == success);
        fake.begin_capture(stream);
        CHECK(table.event_query(event) == error_capture_unsupported);
        CHECK(fake.end_capture(stream).empty());
    }
    CHECK_FALSE(fake.leaks().empty());
}

TEST_CASE("the fake's streams wait for each other's events") {
    fake_driver fake;
    device_context device;
    REQUIRE(device.open(fake.table(), 0) == KV_OK);
    const driver& table = fake.table();
    fake.set_current(fake.primary());
    const stream_handle first = fake.make_stream();
    const stream_handle second = fake.make_stream();
    device_pointer memory = 0;
    REQUIRE(table.memory_allocate(&memory, 16) == success);
    event_handle event = nullptr;
    REQUIRE(table.event_create(&event, event_disable_timing) == success);

    REQUIRE(table.fill_bytes(memory, 1, 16, first) == success);
    REQUIRE(table.event_record(event, first) == success);
    REQUIRE(table.stream_wait_event(second, event, 0) == success);
    REQUIRE(table.fill_bytes(memory, 2, 16, second) == success);
    CHECK_FALSE(fake.run_one(second));
    fake.run_all();
    CHECK(*fake.memory_of<uint8_t>(memory) == 2);
    CHECK(fake.violations.empty());
}
