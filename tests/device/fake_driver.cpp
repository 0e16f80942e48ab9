#include "fake_driver.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "fake_calls.hpp"

namespace kvrt::cuda {

fake_driver* fake_calls::active = nullptr;

fake_driver::fake_driver(const options& settings) : options_(settings) {
    if (fake_calls::active != nullptr) {
        std::fputs("a process has one driver: end the other fake first\n", stderr);
        std::abort();
    }
    fake_calls::active = this;
    fill_table();
    fill_memory_calls();
    fill_stream_calls();
    if (options_.virtual_memory) return;
#define FORGET(name, symbol, parameters) table_.name = nullptr;
    KVRT_CUDA_VIRTUAL_MEMORY_CALLS(FORGET)
#undef FORGET
}

fake_driver::~fake_driver() {
    while (!reservations_.empty()) unreserve(reservations_.begin()->first);
    fake_calls::active = nullptr;
}

driver_result fake_driver::violate(driver_result result, std::string text) {
    violations.push_back(std::move(text));
    return result;
}

void fake_driver::fault(driver_result result, std::string text) {
    violations.push_back(std::move(text));
    if (fault_ == success) fault_ = result;
}

driver_result fake_driver::enter(const char* symbol, bool needs_context, bool unsafe_in_capture) {
    ++counts_[symbol];
    const auto found = injections_.find(symbol);
    if (found != injections_.end()) {
        injection& injected = found->second;
        if (injected.skipped > 0) {
            --injected.skipped;
        } else if (injected.times > 0) {
            --injected.times;
            if (is_fault(injected.result)) fault_ = injected.result;
            return injected.result;
        }
    }
    if (!needs_context) return success;
    if (current() != &primary_) {
        return violate(error_invalid_context,
                       fmt::format("{}: the current context is {}", symbol,
                                   current() == nullptr ? "none" : current()->name));
    }
    if (fault_ != success) return fault_;
    if (unsafe_in_capture && any_capturing() && capture_mode() != capture_mode_relaxed) {
        return violate(error_capture_unsupported, fmt::format("{} during capture", symbol));
    }
    return success;
}

context_handle fake_driver::make_context(const char* name) {
    return &contexts_.emplace_back(context_object{name});
}

context_handle fake_driver::current() const {
    const std::lock_guard<std::recursive_mutex> guard(lock_);
    const auto found = stacks_.find(std::this_thread::get_id());
    return found == stacks_.end() || found->second.empty() ? nullptr : found->second.back();
}

void fake_driver::set_current(context_handle context) {
    const std::lock_guard<std::recursive_mutex> guard(lock_);
    stacks_[std::this_thread::get_id()] = {context};
}

void fake_driver::inject(const char* symbol, driver_result result, unsigned int skipped,
                         unsigned int times) {
    injections_[symbol] = {result, skipped, times};
}

void fake_driver::add_kernel(const char* name, std::vector<std::size_t> parameter_bytes,
                             kernel_body body) {
    functions_[name] = {name, std::move(parameter_bytes), std::move(body)};
}

uint64_t fake_driver::calls(const char* symbol) const {
    const auto found = counts_.find(symbol);
    return found == counts_.end() ? 0 : found->second;
}

std::vector<std::string> fake_driver::leaks() const {
    std::vector<std::string> found;
    if (primary_retained_ != 0) {
        found.push_back(fmt::format("primary context retained {} times", primary_retained_));
    }
    for (const auto& [address, bytes] : reservations_) {
        found.push_back(fmt::format("{} bytes of addresses at {:#x}", bytes, address));
    }
    for (const auto& [address, mapped] : ranges_) {
        found.push_back(fmt::format("{} bytes mapped at {:#x}", mapped.bytes, address));
    }
    for (const auto& [handle, memory] : handles_) {
        if (!memory.released) found.push_back(fmt::format("physical handle {}", handle));
    }
    for (const stream_object& stream : streams_) {
        const bool of_host = streams_of_host_.count(const_cast<stream_object*>(&stream)) != 0;
        if (!stream.destroyed && !of_host) found.push_back("a stream");
    }
    for (const event_object& event : events_) {
        if (!event.destroyed) found.push_back("an event");
    }
    for (const module_object& module : modules_) {
        if (!module.unloaded) found.push_back("a module");
    }
    for (const auto& [memory, bytes] : pinned_) {
        found.push_back(fmt::format("{} bytes of pinned memory", bytes.size()));
    }
    return found;
}

void fake_driver::fill_table() {
    using calls = fake_calls;
    table_.initialise = [](unsigned int) {
        return calls::any("cuInit", [](fake_driver&) { return success; });
    };
    table_.driver_version = [](int* version) {
        *version = 13000;
        return success;
    };
    table_.error_name = [](driver_result error, const char** name) {
        *name = error == success                     ? "CUDA_SUCCESS"
                : error == error_out_of_memory       ? "CUDA_ERROR_OUT_OF_MEMORY"
                : error == error_illegal_address     ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                : error == error_launch_failed       ? "CUDA_ERROR_LAUNCH_FAILED"
                : error == error_invalid_value       ? "CUDA_ERROR_INVALID_VALUE"
                : error == error_invalid_context     ? "CUDA_ERROR_INVALID_CONTEXT"
                : error == error_not_found           ? "CUDA_ERROR_NOT_FOUND"
                : error == error_no_device           ? "CUDA_ERROR_NO_DEVICE"
                : error == error_capture_unsupported ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                                     : nullptr;
        return *name != nullptr ? success : error_invalid_value;
    };
    table_.error_text = [](driver_result error, const char** text) {
        *text = error == success ? "no error" : "an error of the fake driver";
        return success;
    };
    table_.device_count = [](int* count) {
        return calls::any("cuDeviceGetCount", [&](fake_driver& self) {
            *count = self.options_.devices;
            return success;
        });
    };
    table_.device_get = [](device_number* device, int ordinal) {
        return calls::any("cuDeviceGet", [&](fake_driver& self) {
            *device = ordinal;
            return ordinal < self.options_.devices ? success : error_invalid_value;
        });
    };
    table_.device_name = [](char* name, int capacity, device_number) {
        std::snprintf(name, static_cast<std::size_t>(capacity), "a fake device");
        return success;
    };
    table_.total_memory = [](std::size_t* bytes, device_number) {
        return calls::any("cuDeviceTotalMem_v2", [&](fake_driver& self) {
            *bytes = self.options_.memory_bytes;
            return success;
        });
    };
    table_.device_attribute = [](int* value, int attribute, device_number) {
        return calls::any("cuDeviceGetAttribute", [&](fake_driver& self) {
            *value = attribute == attribute_virtual_memory  ? (self.options_.device_maps ? 1 : 0)
                     : attribute == attribute_compute_major ? 9
                                                            : 0;
            return success;
        });
    };
    table_.primary_retain = [](context_handle* context, device_number device) {
        return calls::any("cuDevicePrimaryCtxRetain", [&](fake_driver& self) {
            ++self.primary_retained_;
            self.retained_device_ = device;
            *context = &self.primary_;
            return success;
        });
    };
    table_.primary_release = [](device_number) {
        return calls::any("cuDevicePrimaryCtxRelease_v2", [&](fake_driver& self) {
            if (self.primary_retained_-- <= 0) {
                return self.violate(error_invalid_context, "primary context released too often");
            }
            return success;
        });
    };
    table_.context_push = [](context_handle context) {
        return calls::any("cuCtxPushCurrent_v2", [&](fake_driver& self) {
            if (context == &self.primary_ && self.primary_retained_ == 0) {
                return self.violate(error_invalid_context, "the primary context is not retained");
            }
            self.stacks_[std::this_thread::get_id()].push_back(context);
            return success;
        });
    };
    table_.context_pop = [](context_handle* context) {
        return calls::any("cuCtxPopCurrent_v2", [&](fake_driver& self) {
            std::vector<context_handle>& stack = self.stacks_[std::this_thread::get_id()];
            if (stack.empty()) return self.violate(error_invalid_context, "pop of an empty stack");
            *context = stack.back();
            stack.pop_back();
            return success;
        });
    };
    table_.context_device = [](device_number* device) {
        return calls::any("cuCtxGetDevice", [&](fake_driver& self) {
            if (self.current() == nullptr) return error_invalid_context;
            *device = self.current_device;
            return success;
        });
    };
    table_.module_load = [](module_handle* module, const void*) {
        return calls::in_context("cuModuleLoadData", [&](fake_driver& self) {
            *module = &self.modules_.emplace_back();
            return success;
        });
    };
    table_.module_unload = [](module_handle module) {
        return calls::any("cuModuleUnload", [&](fake_driver& self) {
            if (module->unloaded)
                return self.violate(error_invalid_handle, "module unloaded twice");
            module->unloaded = true;
            return success;
        });
    };
    table_.module_function = [](function_handle* function, module_handle, const char* name) {
        return calls::in_context("cuModuleGetFunction", [&](fake_driver& self) {
            const auto found = self.functions_.find(name);
            if (found == self.functions_.end()) return error_not_found;
            *function = &found->second;
            return success;
        });
    };
    table_.function_set_attribute = [](function_handle function, int attribute, int value) {
        return calls::in_context("cuFuncSetAttribute", [&](fake_driver&) {
            if (attribute == function_dynamic_shared_bytes) function->dynamic_shared_bytes = value;
            return success;
        });
    };
}

}  // namespace kvrt::cuda
