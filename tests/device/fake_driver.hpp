// A CUDA driver for tests, behind the table that the real one fills.
//
//   memory     device addresses are host addresses plus a distance that no pointer survives, so
//              that following one on the host ends the test; ranges are mapped, have access, or not
//   streams    queues: operations run when the test lets them, or when somebody synchronises
//   copies     read and write when they run; a source that changed meanwhile is a violation
//   kernels    functions of the test, by name
//   contexts   a stack per thread; calls that need another than the current one are violations
//   errors     injected by the driver's name of a call; faults stay
//
// It stands in for one process's driver: one object at a time. What it is not told is an error it
// reports in `violations`, and what is left at the end in leaks().
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "driver/driver.hpp"

namespace kvrt::cuda {

struct operation {
    std::string what;
    std::function<void()> run;
    event_handle waits_for = nullptr;  ///< runs only once this has been completed so often
    uint64_t wait_count = 0;
};

struct context_object {
    std::string name;
};
struct stream_object {
    context_handle context = nullptr;
    std::deque<operation> queue;
    std::vector<operation> captured;
    bool blocked = false;
    bool capturing = false;
    bool destroyed = false;
};
struct event_object {
    context_handle context = nullptr;
    uint64_t recorded = 0;
    uint64_t completed = 0;
    double time = 0.0;  ///< microseconds, of the last completion
    bool timed = false;
    bool captured = false;
    bool destroyed = false;
};
struct kernel_launch {
    unsigned int grid[3], block[3], shared_bytes;
    std::vector<std::vector<std::byte>> parameters;

    template <class type>
    type parameter(std::size_t index) const {
        type value;
        std::memcpy(&value, parameters.at(index).data(), sizeof value);
        return value;
    }
};
using kernel_body = std::function<void(const kernel_launch&)>;
struct function_object {
    std::string name;
    std::vector<std::size_t> parameter_bytes;
    kernel_body body;
    int dynamic_shared_bytes = 48 << 10;
};
struct module_object {
    bool unloaded = false;
};

class fake_driver {
  public:
    struct options {
        std::size_t granularity = std::size_t{2} << 20;
        std::size_t memory_bytes = std::size_t{1} << 30;
        bool virtual_memory = true;  ///< the driver has the calls
        bool device_maps = true;     ///< and the device can
        int devices = 1;
    };

    fake_driver() : fake_driver(options()) {}
    explicit fake_driver(const options& settings);
    fake_driver(const fake_driver&) = delete;
    fake_driver& operator=(const fake_driver&) = delete;
    ~fake_driver();

    const driver& table() const { return table_; }

    // What the host of the library has.
    context_handle primary() { return &primary_; }
    context_handle make_context(const char* name);
    device_number retained_device() const { return retained_device_; }  ///< the last that was
    device_number current_device = 0;  ///< of whatever context is current
    context_handle current() const;
    void set_current(context_handle context);
    stream_handle make_stream();  ///< in the primary context
    void* make_pinned(std::size_t bytes);

    // Time. Operations wait until they are let.
    void block(stream_handle stream) { stream->blocked = true; }
    void unblock(stream_handle stream) { stream->blocked = false; }
    bool run_one(stream_handle stream);
    void run_all();
    std::size_t waiting(stream_handle stream) const { return stream->queue.size(); }

    // Graphs: what is enqueued between begin and end is returned instead, to be enqueued by replay.
    void begin_capture(stream_handle stream);
    std::vector<operation> end_capture(stream_handle stream);
    int capture_mode() const;  ///< of this thread: 0 is the strictest
    void replay(const std::vector<operation>& graph, stream_handle stream);

    /// Microseconds that an operation takes, by what it is; others take 1.
    std::map<std::string, double> durations;

    /// Calls of this symbol fail with `result`, `times` of them, after `skipped` have not.
    void inject(const char* symbol, driver_result result, unsigned int skipped = 0,
                unsigned int times = 1);
    void add_kernel(const char* name, std::vector<std::size_t> parameter_bytes, kernel_body body);

    /// From a host address to a device address: beyond all that a process of this machine can map.
    static constexpr device_pointer distance = device_pointer{1} << 60;

    /// Device memory as the host may see it; a violation and a fault where it is not mapped.
    std::byte* memory(device_pointer address, std::size_t bytes);
    template <class type>
    type* memory_of(device_pointer address, std::size_t count = 1) {
        return reinterpret_cast<type*>(memory(address, count * sizeof(type)));
    }
    bool is_mapped(device_pointer address, std::size_t bytes) const;
    bool is_pinned(const void* memory, std::size_t bytes) const;
    std::size_t physical_bytes() const { return physical_bytes_; }
    uint64_t calls(const char* symbol) const;
    uint64_t synchronisations() const { return synchronisations_; }
    std::vector<std::string> violations;
    std::vector<std::string> leaks() const;

  private:
    friend struct fake_calls;

    struct range {
        std::size_t bytes = 0;
        physical_handle handle = 0;  ///< 0: of a plain allocation
        bool accessible = false;
    };
    struct injection {
        driver_result result;
        unsigned int skipped, times;
    };

    void fill_table();
    void fill_memory_calls();
    void fill_stream_calls();
    driver_result enter(const char* symbol, bool needs_context, bool unsafe_in_capture);
    driver_result violate(driver_result result, std::string text);
    void fault(driver_result result, std::string text);
    bool any_capturing() const;

    device_pointer reserve(std::size_t bytes);
    void unreserve(device_pointer address);
    void back(device_pointer address, std::size_t bytes);
    void unback(device_pointer address, std::size_t bytes);
    void drop_handle(physical_handle handle);

    driver_result enqueue(stream_handle stream, operation work);
    driver_result check_stream(stream_handle stream, const char* what);
    driver_result synchronise(const std::function<bool()>& done, const char* what);
    driver_result copy(std::byte* target, device_pointer target_address, const std::byte* source,
                       device_pointer source_address, std::size_t bytes, stream_handle stream);

    options options_;
    driver table_;
    mutable std::recursive_mutex lock_;
    context_object primary_{"primary"};
    int primary_retained_ = 0;
    device_number retained_device_ = 0;
    std::map<std::thread::id, std::vector<context_handle>> stacks_;
    std::map<std::thread::id, int> capture_modes_;
    driver_result fault_ = success;
    std::map<std::string, uint64_t> counts_;
    std::map<std::string, injection> injections_;
    uint64_t synchronisations_ = 0;
    double time_ = 0.0;  ///< microseconds

    std::map<device_pointer, std::size_t> reservations_;  ///< and plain allocations' addresses
    std::map<device_pointer, range> ranges_;              ///< mapped
    struct physical {
        std::size_t bytes = 0;
        unsigned int uses = 0;  ///< the handle's own, and each mapping
        bool released = false;
    };
    std::map<physical_handle, physical> handles_;
    physical_handle next_handle_ = 1;
    std::size_t physical_bytes_ = 0;
    std::map<const std::byte*, std::vector<std::byte>> pinned_;

    // Never freed before the end, so that use after destruction is seen.
    std::deque<context_object> contexts_;
    std::deque<stream_object> streams_;
    std::deque<event_object> events_;
    std::deque<module_object> modules_;
    std::map<std::string, function_object> functions_;
    std::set<stream_handle> streams_of_host_;
};

}  // namespace kvrt::cuda
