// The device behind a pair of twin pools, as the tests use it besides the library: memory for
// tensors that both sides can see, and a stream with what tests have to do in its order.
#pragma once

#include <functional>
#include <vector>

#include "cuda_pool.hpp"

namespace kvrt::cuda {

class twin_device {
  public:
    virtual ~twin_device() = default;

    virtual stream_handle stream() = 0;
    /// Memory that kernels and the host can reach.
    virtual device_pointer allocate(std::size_t bytes) = 0;
    virtual void release(device_pointer memory) = 0;
    /// As the host sees it, in what is enqueued, or once the stream has caught up; null where
    /// nothing is, which is noted.
    virtual std::byte* view(device_pointer memory, std::size_t bytes) = 0;
    /// Memory of the pool, which the host cannot see, once the stream has caught up.
    virtual void read(device_pointer from, std::vector<std::byte>& to, std::size_t bytes) = 0;

    /// Runs behind all that the stream has now, and before whatever comes later.
    virtual void enqueue(const char* what, std::function<void()> run) = 0;
    /// Shows memory of the device as it is when the stream gets there.
    virtual void look(const char* what, device_pointer from, std::size_t bytes,
                      std::function<void(const std::byte*)> run) = 0;
    /// Until the stream has done everything.
    virtual void catch_up() = 0;
    /// Lets it get on by about so many operations, of as many as it likes to.
    virtual void run_some(uint32_t operations) = 0;

    /// What is enqueued between these becomes a graph, which takes the place of one before.
    virtual void begin_capture() = 0;
    virtual void end_capture() = 0;
    virtual void replay() = 0;
};

class fake_twin_device final : public twin_device {
  public:
    explicit fake_twin_device(cuda_host& host) : host_(host) {}

    stream_handle stream() override { return host_.stream; }
    device_pointer allocate(std::size_t bytes) override {
        device_pointer memory = 0;
        in_primary_context(
            [&] { REQUIRE(host_.fake.table().memory_allocate(&memory, bytes) == success); });
        return memory;
    }
    void release(device_pointer memory) override {
        in_primary_context([&] { (void)host_.fake.table().memory_free(memory); });
    }
    std::byte* view(device_pointer memory, std::size_t bytes) override {
        return host_.fake.memory(memory, bytes);
    }
    void read(device_pointer from, std::vector<std::byte>& to, std::size_t bytes) override {
        const std::byte* const memory = host_.fake.memory(from, bytes);
        REQUIRE(memory != nullptr);
        to.assign(memory, memory + bytes);
    }
    void enqueue(const char* what, std::function<void()> run) override {
        host_.stream->queue.push_back({what, std::move(run)});
    }
    void look(const char* what, device_pointer from, std::size_t bytes,
              std::function<void(const std::byte*)> run) override {
        enqueue(what, [this, from, bytes, run = std::move(run)] {
            const std::byte* const memory = host_.fake.memory(from, bytes);
            REQUIRE(memory != nullptr);
            run(memory);
        });
    }
    void catch_up() override { host_.fake.run_all(); }
    void run_some(uint32_t operations) override {
        for (; operations > 0; --operations) host_.fake.run_one(host_.stream);
    }
    void begin_capture() override { host_.fake.begin_capture(host_.stream); }
    void end_capture() override { graph_ = host_.fake.end_capture(host_.stream); }
    void replay() override { host_.fake.replay(graph_, host_.stream); }

  private:
    template <class callable>
    void in_primary_context(const callable& body) {
        const context_handle before = host_.fake.current();
        host_.fake.set_current(host_.fake.primary());
        body();
        host_.fake.set_current(before);
    }

    cuda_host& host_;
    std::vector<operation> graph_;
};

}  // namespace kvrt::cuda
