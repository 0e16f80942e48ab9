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
    gpu_twin_device() = default;
    gpu_twin_device(const gpu_twin_device&) = delete;
    gpu_twin_device& operator=(const gpu_twin_device&) = delete;
    ~gpu_twin_device() override {
        catch_up();
        forget_graph();
        if (copied_ != nullptr) (void)gpu().calls().host_free(copied_);
    }

    stream_handle stream() override { return gpu().stream(); }
    device_pointer allocate(std::size_t bytes) override {
        void* memory = nullptr;
        device_pointer address = 0;
        gpu().demand(gpu().calls().host_allocate(&memory, bytes, host_memory_mapped),
                     "cuMemHostAlloc");
        gpu().demand(gpu().more().host_device_pointer(&address, memory, 0),
                     "cuMemHostGetDevicePointer");
        const std::lock_guard<std::mutex> guard(memory_lock_);
        memory_[address] = {static_cast<std::byte*>(memory), bytes};
        return address;
    }
    void release(device_pointer address) override {
        const std::lock_guard<std::mutex> guard(memory_lock_);
        gpu().demand(gpu().calls().host_free(memory_.at(address).start), "cuMemFreeHost");
        memory_.erase(address);
    }
    std::byte* view(device_pointer address, std::size_t bytes) override {
        const std::lock_guard<std::mutex> guard(memory_lock_);
        auto found = memory_.upper_bound(address);
        if (found == memory_.begin()) return nullptr;
        --found;
        const std::size_t offset = address - found->first;
        return offset + bytes <= found->second.bytes ? found->second.start + offset : nullptr;
    }
    void read(device_pointer from, std::vector<std::byte>& to, std::size_t bytes) override {
        if (bytes > copied_bytes_) {
            if (copied_ != nullptr) (void)gpu().calls().host_free(copied_);
            gpu().demand(gpu().calls().host_allocate(&copied_, bytes, 0), "cuMemHostAlloc");
            copied_bytes_ = bytes;
        }
        gpu().demand(gpu().calls().copy_to_host(copied_, from, bytes, stream()),
                     "cuMemcpyDtoHAsync");
        gpu().synchronise();
        const std::byte* const start = static_cast<const std::byte*>(copied_);
        to.assign(start, start + bytes);
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
    struct allocation {
        std::byte* start = nullptr;
        std::size_t bytes = 0;
    };
    void forget_graph() {
        if (graph_ == nullptr) return;
        gpu().demand(gpu().more().executable_destroy(graph_), "cuGraphExecDestroy");
        graph_ = nullptr;
    }

    std::mutex memory_lock_;  ///< the driver's thread looks up what this one allocates
    std::map<device_pointer, allocation> memory_;
    std::deque<std::function<void()>> waiting_;  ///< whose addresses the driver has
    executable_handle graph_ = nullptr;
    void* copied_ = nullptr;
    std::size_t copied_bytes_ = 0;
    std::mutex lock_;
    std::condition_variable changed_;
    bool held_ = false;
};

}  // namespace kvrt::cuda
