// libcuda.so.1 for machines without one: the fake driver and the emulated kernels of tests/device
// behind the driver's own symbols, so that whole programs run over them as on a GPU. What is
// enqueued runs when somebody waits for it. At the end of the process it writes what happened, and
// what went wrong, to the file that KVRT_STAND_IN_REPORT names:
//
//   launches 12
//   synchronisations 3
//   violation: ...     a line for each; a leak is one too
//
// KVRT_STAND_IN_DEFECT names what one of the launches does wrong:
//
//   write    rows go beside their places
//   compact  positions stay where they were, though their rows have moved
//   seal     rows are read in another order
//   tables   an upload is lost
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>

#include "device/fake_calls.hpp"
#include "device/fake_kernels.hpp"
#include "host_driver.hpp"

namespace kvrt::cuda {

struct graph_object {
    std::vector<operation> operations;
};

namespace {

struct stand_in {
    kernel_faults faults;
    uint32_t launches = 0;  ///< of the kernel that does wrong
    fake_driver fake;
    std::deque<graph_object> graphs;
    std::size_t live_graphs = 0;

    stand_in() {
        const char* const named = std::getenv("KVRT_STAND_IN_DEFECT");
        const std::string defect = named != nullptr ? named : "";
        if (defect == "write") {
            faults.write = [this](kernels::write_parameters& call) {
                if (call.place.keys.codes == kernels::coding::plain && ++launches == 3) {
                    call.place.values.slot_stride += 8;
                }
            };
        } else if (defect == "compact") {
            faults.compact = [this](kernels::compact_parameters& call) {
                if (++launches == 1) call.positions.base = nullptr;
            };
        } else if (defect == "seal") {
            faults.seal = [this](kernels::seal_parameters& call) {
                if (++launches == 2) call.from.keys.slot_stride *= 2;
            };
        } else if (defect == "tables") {
            faults.spread = [this](kernels::spread_parameters&) { return ++launches != 6; };
        }
        add_kernels(fake, faults);
    }
    ~stand_in() {
        const char* const path = std::getenv("KVRT_STAND_IN_REPORT");
        std::FILE* const report = path != nullptr ? std::fopen(path, "a") : nullptr;
        if (report == nullptr) return;
        std::fprintf(report, "launches %llu\nsynchronisations %llu\n",
                     static_cast<unsigned long long>(fake.calls("cuLaunchKernel")),
                     static_cast<unsigned long long>(fake.synchronisations()));
        std::vector<std::string> wrong = fake.violations;
        for (const std::string& leak : fake.leaks()) wrong.push_back("left behind: " + leak);
        if (live_graphs != 0) wrong.push_back("left behind: a graph");
        for (std::string& each : wrong) {
            std::replace(each.begin(), each.end(), '\n', ' ');
            std::fprintf(report, "violation: %s\n", each.c_str());
        }
        std::fclose(report);
    }
};

stand_in& here() {
    static stand_in made;
    return made;
}

template <auto member>
struct forward;
template <class... types, driver_result (*driver::*member)(types...)>
struct forward<member> {
    static driver_result call(types... arguments) {
        return (here().fake.table().*member)(arguments...);
    }
};

/// No time passes here.
template <>
struct forward<&driver::event_elapsed> {
    static driver_result call(float* milliseconds, event_handle, event_handle) {
        *milliseconds = 1.0f;
        return success;
    }
};
/// Memory of the host that is mapped for the device is some of the device's, as the host sees it.
template <>
struct forward<&driver::host_allocate> {
    static driver_result call(void** memory, size_t bytes, unsigned int flags) {
        const driver& calls = here().fake.table();
        if ((flags & host_memory_mapped) == 0) return calls.host_allocate(memory, bytes, flags);
        device_pointer mapped = 0;
        const driver_result result = calls.memory_allocate(&mapped, bytes);
        *memory = reinterpret_cast<void*>(mapped - fake_driver::distance);
        return result;
    }
};
device_pointer mapped_address(void* memory) {
    return reinterpret_cast<device_pointer>(memory) + fake_driver::distance;
}
template <>
struct forward<&driver::host_free> {
    static driver_result call(void* memory) {
        const driver& calls = here().fake.table();
        return here().fake.is_mapped(mapped_address(memory), 1)
                   ? calls.memory_free(mapped_address(memory))
                   : calls.host_free(memory);
    }
};

/// Runs what is enqueued on the stream, and whatever that waits for. A kernel that went astray is a
/// fault of the device, as it is on a GPU.
driver_result run(stream_handle stream) {
    fake_driver& fake = here().fake;
    return fake_calls::outside_capture("cuStreamSynchronize", [&](fake_driver&) {
        event_handle event = nullptr;
        const driver& calls = fake.table();
        const std::size_t known = fake.violations.size();
        driver_result result = calls.event_create(&event, event_disable_timing);
        if (result == success) result = calls.event_record(event, stream);
        if (result == success) result = calls.event_synchronize(event);
        for (std::size_t i = known; i < fake.violations.size(); ++i) {
            if (fake.violations[i].find("an access outside") == std::string::npos) continue;
            fake.inject("cuEventSynchronize", error_illegal_address);
            result = calls.event_synchronize(event);
            break;
        }
        if (event != nullptr) (void)calls.event_destroy(event);
        return result;
    });
}

}  // namespace

}  // namespace kvrt::cuda

using namespace kvrt::cuda;

#define KVRT_STAND_IN_EXPORT extern "C" __attribute__((visibility("default")))

// A function of the driver's name and parameters that is, from when it is looked up, the table's.
#define KVRT_STAND_IN(name, symbol, parameters)                                                  \
    using kvrt_type_##symbol = driver_result(*) parameters;                                      \
    extern "C" kvrt_type_##symbol kvrt_find_##symbol() { return &forward<&driver::name>::call; } \
    KVRT_STAND_IN_EXPORT driver_result symbol parameters                                         \
        __attribute__((ifunc("kvrt_find_" #symbol)));
KVRT_CUDA_CALLS(KVRT_STAND_IN)
KVRT_CUDA_VIRTUAL_MEMORY_CALLS(KVRT_STAND_IN)
#undef KVRT_STAND_IN

KVRT_STAND_IN_EXPORT driver_result cuCtxSetCurrent(context_handle context) {
    here().fake.set_current(context);
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuMemGetInfo_v2(size_t* available, size_t* total) {
    *total = fake_driver::options().memory_bytes;
    *available = *total - here().fake.physical_bytes();
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuMemHostGetDevicePointer_v2(device_pointer* address,
                                                                void* memory, unsigned int) {
    *address = mapped_address(memory);
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuStreamSynchronize(stream_handle stream) { return run(stream); }

KVRT_STAND_IN_EXPORT driver_result cuLaunchHostFunc(stream_handle stream, host_function function,
                                                    void* data) {
    stream->queue.push_back({"a function of the host", [=] { function(data); }});
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuStreamBeginCapture_v2(stream_handle stream, int) {
    here().fake.begin_capture(stream);
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuStreamEndCapture(stream_handle stream, graph_handle* graph) {
    here().graphs.push_back({here().fake.end_capture(stream)});
    *graph = &here().graphs.back();
    ++here().live_graphs;
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuGraphInstantiateWithFlags(executable_handle* executable,
                                                               graph_handle graph,
                                                               unsigned long long) {
    *executable = reinterpret_cast<executable_handle>(graph);
    ++here().live_graphs;
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuGraphLaunch(executable_handle executable,
                                                 stream_handle stream) {
    here().fake.replay(reinterpret_cast<graph_handle>(executable)->operations, stream);
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuGraphDestroy(graph_handle) {
    --here().live_graphs;
    return success;
}

KVRT_STAND_IN_EXPORT driver_result cuGraphExecDestroy(executable_handle) {
    --here().live_graphs;
    return success;
}
