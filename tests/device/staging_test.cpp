// Uploads: what the device reads late must not be written again early. The first case is the race
// that engines shipped: a step's tables are overwritten by the next step's while a busy stream has
// not copied them yet.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "driver/table.hpp"
#include "fake_driver.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

bool message_has(const char* part) {
    return std::string(message_buffer()).find(part) != std::string::npos;
}

struct world {
    fake_driver fake;
    host_allocator allocator;
    device_context device;
    std::unique_ptr<device_table> table = std::make_unique<device_table>();
    std::unique_ptr<staging_ring> ring = std::make_unique<staging_ring>();
    stream_handle stream = fake.make_stream();
    module_handle module = nullptr;
    function_handle spread = nullptr;
    std::vector<std::vector<uint32_t>> seen;  ///< by steps' kernels, when they ran

    world(uint64_t ring_bytes, uint64_t words, bool with_kernel) {
        fake.add_kernel(
            spread_kernel, {sizeof(kernels::spread_parameters)},
            [this](const kernel_launch& launch) {
                const auto call = launch.parameter<kernels::spread_parameters>(0);
                REQUIRE(launch.grid[0] * launch.block[0] >= call.count * line_words);
                const uint64_t head = (call.count * sizeof(uint32_t) + line_bytes - 1) / line_bytes;
                const uint32_t* batch =
                    fake.memory_of<uint32_t>(reinterpret_cast<device_pointer>(call.batch),
                                             head * line_words + call.count * line_words);
                for (uint32_t i = 0; i < call.count; ++i) {
                    uint32_t* line =
                        fake.memory_of<uint32_t>(reinterpret_cast<device_pointer>(call.table) +
                                                     uint64_t{batch[i]} * line_bytes,
                                                 line_words);
                    std::copy_n(batch + head * line_words + i * line_words, line_words, line);
                }
            });
        REQUIRE(device.open(fake.table(), 0) == KV_OK);
        REQUIRE(ring->create(device, ring_bytes) == KV_OK);
        if (with_kernel) {
            const current_context here(device);
            REQUIRE(fake.table().module_load(&module, "an image") == success);
            REQUIRE(fake.table().module_function(&spread, module, spread_kernel) == success);
        }
        REQUIRE(table->create(device, allocator, words, spread) == KV_OK);
    }

    /// A kernel of a step that reads the whole table.
    void look() {
        stream->queue.push_back({"look", [this] {
                                     const uint32_t* words =
                                         fake.memory_of<uint32_t>(table->address(), table->words());
                                     seen.emplace_back(words, words + table->words());
                                 }});
    }
    std::vector<uint32_t> image() const {
        std::vector<uint32_t> words(table->words());
        for (uint64_t i = 0; i < words.size(); ++i) words[i] = table->read(i);
        return words;
    }
    void write(uint64_t index, uint32_t word) { table->write(index, word); }
    /// A kernel that writes to some words from a line on, which the image does not know.
    void scribble(uint64_t line, uint64_t count) {
        const uint64_t first = line * line_words;
        stream->queue.push_back({"scribble", [this, first, count] {
                                     uint32_t* const words =
                                         fake.memory_of<uint32_t>(table->address(), table->words());
                                     std::fill_n(words + first, count, 77u);
                                 }});
        table->forget(first, count);
    }
    void end() {
        ring.reset();  // waits for what is in flight
        table.reset();
        if (module != nullptr) CHECK(fake.table().module_unload(module) == success);
        CHECK(fake.leaks().size() == 1);  // the device's context
        CHECK(allocator.live_bytes == 0);
        for (const std::string& violation : fake.violations) FAIL_CHECK(violation);
        CHECK(fake.current() == nullptr);
    }
};

}  // namespace

TEST_CASE("two steps open on a blocked stream: each sees its own tables") {
    for (const bool with_kernel : {false, true}) {
        CAPTURE(with_kernel);
        world of(4096, 256, with_kernel);
        REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);
        of.fake.run_all();

        of.fake.block(of.stream);
        std::vector<std::vector<uint32_t>> expected;
        for (uint32_t step = 1; step <= 2; ++step) {
            for (uint32_t row = 0; row < 16; row += 2) of.write(row * 16 + step, 100 * step + row);
            REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);
            CHECK(of.table->pending_lines() == 0);
            of.look();
            expected.push_back(of.image());
        }
        CHECK(of.seen.empty());
        CHECK(of.ring->in_flight() == 2);
        CHECK(of.fake.synchronisations() == 0);
        of.fake.unblock(of.stream);
        of.fake.run_all();
        CHECK(of.seen == expected);
        CHECK(of.fake.calls("cuLaunchKernel") == (with_kernel ? 2 : 0));
        of.end();
    }
}

TEST_CASE("a full ring says so, keeps what is in flight, and goes on from there") {
    for (const bool with_kernel : {false, true}) {
        CAPTURE(with_kernel);
        world of(1024, 640, with_kernel);
        of.fake.block(of.stream);
        const std::vector<uint32_t> all(640, 5);
        of.table->write(0, all.data(), all.size());
        // 40 lines of 64 bytes: more than the ring holds at once.
        CHECK(of.table->upload(*of.ring, of.stream) == KV_AGAIN);
        CHECK(message_has("in flight"));
        const uint64_t pending = of.table->pending_lines();
        CHECK(pending > 0);
        CHECK(pending < 40);
        CHECK(of.table->upload(*of.ring, of.stream) == KV_AGAIN);
        CHECK(of.table->pending_lines() == pending);
        CHECK(of.fake.synchronisations() == 0);

        of.fake.unblock(of.stream);
        uint32_t calls = 0;
        for (status verdict = KV_AGAIN; verdict != KV_OK && calls < 10; ++calls) {
            of.fake.run_all();
            verdict = of.table->upload(*of.ring, of.stream);
        }
        CHECK(calls < 10);
        of.look();
        of.fake.run_all();
        CHECK(of.seen.back() == all);
        of.end();
    }
}

TEST_CASE("few runs are copies, many lines one copy and one kernel") {
    world of(65536, 16 * 1024, true);
    REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);  // nothing: the device fills its own
    CHECK(of.fake.calls("cuMemsetD8Async") == 1);
    CHECK(of.fake.calls("cuMemcpyHtoDAsync_v2") == 0);
    of.look();
    of.fake.run_all();
    CHECK(of.seen.back() == of.image());
    CHECK(of.image() == std::vector<uint32_t>(16 * 1024, 0xffffffffu));
    const std::vector<uint32_t> run(16 * 100, 5);
    of.table->write(16 * 50, run.data(), run.size());
    REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);
    CHECK(of.fake.calls("cuLaunchKernel") == 0);
    CHECK(of.fake.calls("cuMemcpyHtoDAsync_v2") == 1);
    of.fake.run_all();
    for (uint64_t row = 0; row < 512; ++row) of.write(row * 32, 7);
    REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);
    CHECK(of.fake.calls("cuLaunchKernel") == 1);
    CHECK(of.fake.calls("cuMemcpyHtoDAsync_v2") == 2);
    of.fake.run_all();

    // Whole lines that the device has already cost nothing; parts go up again.
    std::vector<uint32_t> lines = of.image();
    of.table->write(0, lines.data(), lines.size() - 3);
    CHECK(of.table->pending_lines() == 1);
    REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);
    CHECK(of.fake.calls("cuMemcpyHtoDAsync_v2") == 3);
    lines[20] = 8;
    of.table->write(0, lines.data(), lines.size());
    CHECK(of.table->pending_lines() == 1);
    of.end();
}

TEST_CASE("whatever is written, whenever it is uploaded and run, the device has what was meant") {
    for (const bool with_kernel : {false, true}) {
        CAPTURE(with_kernel);
        world of(8192, 9000, with_kernel);
        std::mt19937 random(with_kernel ? 5 : 6);
        std::vector<std::vector<uint32_t>> expected;
        std::vector<uint32_t> words(600);
        for (uint32_t step = 0; step < 400; ++step) {
            for (uint32_t i = random() % 30; i > 0; --i) {
                const uint64_t count =
                    random() % 8 == 0 ? random() % words.size() : 1 + random() % 3;
                std::generate_n(words.begin(), count, [&] { return random() % 5; });
                of.table->write(random() % (9000 - count), words.data(), count);
            }
            if (random() % 4 == 0) of.scribble(random() % 500, 1 + random() % 70);
            status verdict = of.table->upload(*of.ring, of.stream);
            for (uint32_t i = 0; verdict == KV_AGAIN && i < 100; ++i) {
                of.fake.run_one(of.stream);
                verdict = of.table->upload(*of.ring, of.stream);
            }
            REQUIRE(verdict == KV_OK);
            of.look();
            expected.push_back(of.image());
            for (uint32_t i = random() % 12; i > 0; --i) of.fake.run_one(of.stream);
        }
        of.fake.run_all();
        REQUIRE(of.seen.size() == expected.size());
        for (std::size_t step = 0; step < expected.size(); ++step) {
            REQUIRE(of.seen[step] == expected[step]);
        }
        CHECK(of.fake.synchronisations() == 0);
        CHECK((of.fake.calls("cuLaunchKernel") > 100) == with_kernel);
        of.end();
    }
}

TEST_CASE("batches go around the ring, and wait for the oldest") {
    world of(1024, 16, false);
    of.fake.block(of.stream);
    REQUIRE(of.ring->open(448, 448, of.stream) == KV_OK);
    const std::byte* const first = of.ring->data();
    REQUIRE(of.ring->close(448) == KV_OK);
    REQUIRE(of.ring->open(256, 448, of.stream) == KV_OK);
    CHECK(of.ring->data() == first + 448);
    CHECK(of.ring->size() == 448);
    REQUIRE(of.ring->close(448) == KV_OK);
    CHECK(of.ring->open(192, 192, of.stream) == KV_AGAIN);
    REQUIRE(of.ring->open(64, 128, of.stream) == KV_OK);
    REQUIRE(of.ring->close(128) == KV_OK);
    CHECK(of.ring->open(64, 64, of.stream) == KV_AGAIN);

    of.fake.unblock(of.stream);
    REQUIRE(of.fake.run_one(of.stream));  // the event of the first
    REQUIRE(of.ring->open(128, 448, of.stream) == KV_OK);
    CHECK(of.ring->data() == first);
    CHECK(of.ring->size() == 448);
    REQUIRE(of.ring->close(100) == KV_OK);
    REQUIRE(of.ring->open(64, 4096, of.stream) == KV_OK);
    CHECK(of.ring->data() == first + 128);  // 100 bytes, to whole lines
    CHECK(of.ring->size() == 448 - 128);
    REQUIRE(of.ring->close(64) == KV_OK);
    CHECK(of.ring->open(2048, 2048, of.stream) == KV_TOO_LARGE);
    of.end();
}

TEST_CASE("so many batches are in flight, and no more") {
    world of(65536, 16, false);
    for (uint32_t i = 0; i < staging_ring::most_batches; ++i) {
        REQUIRE(of.ring->open(64, 64, of.stream) == KV_OK);
        REQUIRE(of.ring->close(64) == KV_OK);
    }
    CHECK(of.ring->open(64, 64, of.stream) == KV_AGAIN);
    CHECK(of.ring->in_flight() == staging_ring::most_batches);
    REQUIRE(of.fake.run_one(of.stream));
    CHECK(of.ring->open(64, 64, of.stream) == KV_OK);
    REQUIRE(of.ring->close(64) == KV_OK);
    of.end();
}

TEST_CASE("small batches of one stream become one, and only room is a limit") {
    world of(1024, 16, false);
    const stream_handle other = of.fake.make_stream();
    {
        staging_ring ring;
        REQUIRE(ring.create(of.device, 65536, true) == KV_OK);
        const auto send = [&](stream_handle stream) {
            const status verdict = ring.open(64, 64, stream);
            if (verdict < 0) return verdict;
            std::memset(ring.data(), 1, 64);  // the fake says where that has not been read yet
            REQUIRE(ring.copy(ring.on_device(0), 0, 64) == KV_OK);
            return ring.close(64);
        };
        uint32_t sent = 0;
        while (sent < 2000 && send(of.stream) == KV_OK) ++sent;
        CHECK(sent == 65536 / 64);
        CHECK(ring.in_flight() == staging_ring::most_batches / 2);
        for (uint32_t i = 0; i < 2; ++i) REQUIRE(of.fake.run_one(of.stream));  // a copy, its event
        CHECK(send(of.stream) == KV_OK);  // around the ring's end, apart
        CHECK(send(of.stream) == KV_AGAIN);
        of.fake.run_all();
        for (uint32_t i = 0; i < 12; ++i) CHECK(send(of.stream) == KV_OK);
        const uint32_t before = ring.in_flight();
        CHECK(send(other) == KV_OK);
        CHECK(ring.in_flight() == before + 1);  // which has an order of its own
        of.fake.run_all();
        CHECK(send(of.stream) == KV_OK);
        CHECK(ring.in_flight() == 1);
        of.fake.run_all();
    }
    of.end();
}

TEST_CASE("uploads are for streams that are not captured, and not the default one") {
    world of(1024, 16, false);
    of.write(3, 4);
    of.fake.begin_capture(of.stream);
    CHECK(of.table->upload(*of.ring, of.stream) == KV_INVALID);
    CHECK(of.fake.end_capture(of.stream).empty());
    CHECK(of.table->upload(*of.ring, nullptr) == KV_INVALID);
    CHECK(of.table->pending_lines() == 1);
    CHECK(of.table->upload(*of.ring, of.stream) == KV_OK);
    of.end();
}

TEST_CASE("an upload that fails leaves its lines pending") {
    for (const char* symbol : {"cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord"}) {
        CAPTURE(symbol);
        world of(8192, 16 * 64, true);
        REQUIRE(of.table->upload(*of.ring, of.stream) == KV_OK);
        of.fake.run_all();
        for (uint64_t line = 0; line < 64; line += 2) of.write(line * 16, 3);
        of.fake.inject(symbol, error_invalid_value);
        CHECK(of.table->upload(*of.ring, of.stream) == KV_DEVICE);
        const bool enqueued = std::string(symbol) == "cuEventRecord";
        CHECK(of.table->pending_lines() == (enqueued ? 0 : 32));
        if (!enqueued) CHECK(of.table->upload(*of.ring, of.stream) == KV_OK);
        of.look();
        of.fake.run_all();
        CHECK(of.seen.back() == of.image());
        of.end();
    }
}

TEST_CASE("after a fault nothing is uploaded") {
    world of(1024, 16, false);
    of.write(1, 2);
    of.fake.inject("cuMemcpyHtoDAsync_v2", error_launch_failed);
    CHECK(of.table->upload(*of.ring, of.stream) == KV_DEVICE);
    CHECK(message_has("CUDA_ERROR_LAUNCH_FAILED"));
    CHECK(of.table->upload(*of.ring, of.stream) == KV_DEVICE);
    CHECK(message_has("failed earlier"));
    of.end();
}
