// A GPU behind a pair of twin pools (tests/device/twin_pools.hpp): tensors lie in host memory that
// is mapped for the device, and what tests do in a stream's order are host functions in it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "device/twin_pools.hpp"
#include "host_driver.hpp"

namespace kvrt::cuda {

/// Opened by main.
gpu_host& gpu();

class gpu_twin_device final : public twin_device {
  public:
    gpu_twin_device() { copies_.make(copied_bytes, 0); }
    gpu_twin_device(const gpu_twin_device&) = delete;
    gpu_twin_device& operator=(const gpu_twin_device&) = delete;
    ~gpu_twin_device() override {
        catch_up();
        forget_graph();
    }

    stream_handle stream() override { return gpu().stream(); }
    /// Pieces of few allocations, made before a stream stands still: the driver may wait for it.
    device_pointer allocate(std::size_t bytes) override {
        const std::lock_guard<std::mutex> guard(memory_lock_);
        if (memory_.empty() || memory_.back().used + bytes > memory_.back().bytes) {
            memory_.emplace_back().make(std::max(bytes, chunk_bytes), host_memory_mapped);
        }
        return memory_.back().address + memory_.back().take(bytes);
    }
    void release(device_pointer) override {}  // with all others
    std::byte* view(device_pointer address, std::size_t bytes) override {
        const std::lock_guard<std::mutex> guard(memory_lock_);
        for (const pinned& each : memory_) {
            if (address < each.address || address - each.address + bytes > each.bytes) continue;
            return each.start + (address - each.address);
        }
        return nullptr;
    }
    void read(device_pointer from, std::vector<std::byte>& to, std::size_t bytes) override {
        std::byte* const copied = copy(from, bytes);
        gpu().synchronise();
        to.assign(copied, copied + bytes);
        copies_.used = 0;
    }
    void look(const char* what, device_pointer from, std::size_t bytes,
              std::function<void(const std::byte*)> run) override {
        const std::byte* const copied = copy(from, bytes);
        enqueue(what, [copied, run = std::move(run)] { run(copied); });
    }

    void enqueue(const char*, std::function<void()> run) override {
        waiting_.push_back(std::move(run));
        gpu().demand(
            gpu().more().launch_host(
                stream(), [](void* data) { (*static_cast<std::function<void()>*>(data))(); },
                &waiting_.back()),
            "cuLaunchHostFunc");
    }
    void catch_up() override {
        let_go();
        gpu().synchronise();
        waiting_.clear();
        copies_.used = 0;
    }
    /// A GPU gets on by itself.
    void run_some(uint32_t) override {}

    void begin_capture() override {
        gpu().demand(gpu().more().begin_capture(stream(), capture_mode_thread_local),
                     "cuStreamBeginCapture");
    }
    void end_capture() override {
        forget_graph();
        graph_handle graph = nullptr;
        gpu().demand(gpu().more().end_capture(stream(), &graph), "cuStreamEndCapture");
        gpu().demand(gpu().more().graph_instantiate(&graph_, graph, 0),
                     "cuGraphInstantiateWithFlags");
        gpu().demand(gpu().more().graph_destroy(graph), "cuGraphDestroy");
    }
    void replay() override {
        gpu().demand(gpu().more().graph_launch(graph_, stream()), "cuGraphLaunch");
    }

    /// The stream stands still from here on, until somebody catches up, or lets it go.
    void hold() {
        const std::lock_guard<std::mutex> guard(lock_);
        held_ = true;
        enqueue("hold", [this] {
            std::unique_lock<std::mutex> waits(lock_);
            changed_.wait(waits, [this] { return !held_; });
        });
    }
    void let_go() {
        {
            const std::lock_guard<std::mutex> guard(lock_);
            held_ = false;
        }
        changed_.notify_all();
    }

  private:
    static constexpr std::size_t chunk_bytes = std::size_t{64} << 20;
    static constexpr std::size_t copied_bytes = std::size_t{8} << 20;  ///< until it catches up

    struct pinned {
        std::byte* start = nullptr;
        device_pointer address = 0;  ///< of what is mapped
        std::size_t bytes = 0, used = 0;

        pinned() = default;
        pinned(const pinned&) = delete;
        pinned& operator=(const pinned&) = delete;
        ~pinned() {
            if (start != nullptr) (void)gpu().calls().host_free(start);
        }
        void make(std::size_t wanted, unsigned int flags) {
            void* memory = nullptr;
            gpu().demand(gpu().calls().host_allocate(&memory, wanted, flags), "cuMemHostAlloc");
            start = static_cast<std::byte*>(memory);
            bytes = wanted;
            if ((flags & host_memory_mapped) == 0) return;
            gpu().demand(gpu().more().host_device_pointer(&address, memory, 0),
                         "cuMemHostGetDevicePointer");
        }
        std::size_t take(std::size_t wanted) {
            const std::size_t at = used;
            used += (wanted + 255) / 256 * 256;
            return at;
        }
    };
    /// In the stream's order; there until the stream has been waited for.
    std::byte* copy(device_pointer from, std::size_t bytes) {
        if (copies_.used + bytes > copies_.bytes) catch_up();
        REQUIRE(bytes <= copies_.bytes);
        std::byte* const to = copies_.start + copies_.take(bytes);
        gpu().demand(gpu().calls().copy_to_host(to, from, bytes, stream()), "cuMemcpyDtoHAsync");
        return to;
    }
    void forget_graph() {
        if (graph_ == nullptr) return;
        gpu().demand(gpu().more().executable_destroy(graph_), "cuGraphExecDestroy");
        graph_ = nullptr;
    }

    std::mutex memory_lock_;  ///< the driver's thread looks up what this one allocates
    std::deque<pinned> memory_;
    pinned copies_;
    std::deque<std::function<void()>> waiting_;  ///< whose addresses the driver has
    executable_handle graph_ = nullptr;
    std::mutex lock_;
    std::condition_variable changed_;
    bool held_ = false;
};

}  // namespace kvrt::cuda
