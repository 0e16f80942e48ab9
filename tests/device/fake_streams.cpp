// The fake driver's streams: what is enqueued, and when it runs.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "fake_calls.hpp"

namespace kvrt::cuda {

stream_handle fake_driver::make_stream() {
    stream_object& made = streams_.emplace_back();
    made.context = &primary_;
    streams_of_host_.insert(&made);
    return &made;
}

bool fake_driver::any_capturing() const {
    return std::any_of(streams_.begin(), streams_.end(),
                       [](const stream_object& stream) { return stream.capturing; });
}

void fake_driver::begin_capture(stream_handle stream) { stream->capturing = true; }

std::vector<operation> fake_driver::end_capture(stream_handle stream) {
    stream->capturing = false;
    return std::move(stream->captured);
}

void fake_driver::replay(const std::vector<operation>& graph, stream_handle stream) {
    for (const operation& node : graph) stream->queue.push_back(node);
}

int fake_driver::capture_mode() const {
    const auto found = capture_modes_.find(std::this_thread::get_id());
    return found == capture_modes_.end() ? 0 : found->second;
}

bool fake_driver::run_one(stream_handle stream) {
    const std::lock_guard<std::recursive_mutex> guard(lock_);
    if (stream->blocked || stream->queue.empty() || fault_ != success) return false;
    const operation& first = stream->queue.front();
    if (first.waits_for != nullptr && first.waits_for->completed < first.wait_count) return false;
    const operation next = std::move(stream->queue.front());
    stream->queue.pop_front();
    next.run();
    const auto duration = durations.find(next.what);
    time_ += duration != durations.end() ? duration->second : 1.0;
    return true;
}

void fake_driver::run_all() {
    for (bool any = true; any;) {
        any = false;
        for (stream_object& stream : streams_) {
            while (run_one(&stream)) any = true;
        }
    }
}

driver_result fake_driver::synchronise(const std::function<bool()>& done, const char* what) {
    ++synchronisations_;
    // No further than it must: what is behind that may run later still.
    for (bool any = true; any && !done();) {
        any = false;
        for (stream_object& stream : streams_) any = (!done() && run_one(&stream)) || any;
    }
    if (fault_ != success) return fault_;
    if (done()) return success;
    return violate(error_unknown, fmt::format("{} would wait for ever", what));
}

driver_result fake_driver::check_stream(stream_handle stream, const char* what) {
    if (reinterpret_cast<uintptr_t>(stream) <= 2) {
        return violate(error_invalid_handle, fmt::format("{} on the default stream", what));
    }
    if (stream->destroyed) {
        return violate(error_invalid_handle, fmt::format("{} on a destroyed stream", what));
    }
    if (stream->context != current()) {
        return violate(error_invalid_context, fmt::format("{}: stream of another context", what));
    }
    return success;
}

driver_result fake_driver::enqueue(stream_handle stream, operation work) {
    const driver_result checked = check_stream(stream, work.what.c_str());
    if (checked != success) return checked;
    if (stream->capturing) {
        stream->captured.push_back(std::move(work));
    } else {
        stream->queue.push_back(std::move(work));
    }
    return success;
}

/// A null pointer's side is on the device, at its address.
driver_result fake_driver::copy(std::byte* target, device_pointer target_address,
                                const std::byte* source, device_pointer source_address,
                                std::size_t bytes, stream_handle stream) {
    const std::byte* host = target != nullptr ? target : source;
    if (host != nullptr && !is_pinned(host, bytes)) {
        return violate(error_invalid_value, "a copy whose host memory is not pinned waits");
    }
    const bool captured = stream != nullptr && stream->capturing;
    std::vector<std::byte> seen;
    if (source != nullptr && !captured) seen.assign(source, source + bytes);
    operation work;
    work.what = fmt::format("copy of {} bytes", bytes);
    work.run = [=, this, seen = std::move(seen)] {
        const std::byte* from = source != nullptr ? source : memory(source_address, bytes);
        std::byte* to = target != nullptr ? target : memory(target_address, bytes);
        if (from == nullptr || to == nullptr) return;
        if (!seen.empty() && !is_pinned(source, bytes)) {
            violate(error_unknown, "pinned memory was freed before its copy had run");
            return;
        }
        if (!seen.empty() && std::memcmp(from, seen.data(), bytes) != 0) {
            violate(error_unknown, "pinned memory was overwritten before its copy had run");
        }
        std::memmove(to, from, bytes);
    };
    return enqueue(stream, std::move(work));
}

void fake_driver::fill_stream_calls() {
    using calls = fake_calls;
    table_.copy_to_device = [](device_pointer target, const void* source, std::size_t bytes,
                               stream_handle stream) {
        return calls::in_context("cuMemcpyHtoDAsync_v2", [&](fake_driver& self) {
            return self.copy(nullptr, target, static_cast<const std::byte*>(source), 0, bytes,
                             stream);
        });
    };
    table_.copy_to_host = [](void* target, device_pointer source, std::size_t bytes,
                             stream_handle stream) {
        return calls::in_context("cuMemcpyDtoHAsync_v2", [&](fake_driver& self) {
            return self.copy(static_cast<std::byte*>(target), 0, nullptr, source, bytes, stream);
        });
    };
    table_.copy_on_device = [](device_pointer target, device_pointer source, std::size_t bytes,
                               stream_handle stream) {
        return calls::in_context("cuMemcpyDtoDAsync_v2", [&](fake_driver& self) {
            return self.copy(nullptr, target, nullptr, source, bytes, stream);
        });
    };
    table_.fill_bytes = [](device_pointer target, unsigned char value, std::size_t bytes,
                           stream_handle stream) {
        return calls::in_context("cuMemsetD8Async", [&](fake_driver& self) {
            return self.enqueue(stream, {"fill", [=, &self] {
                                             std::byte* to = self.memory(target, bytes);
                                             if (to != nullptr) std::memset(to, value, bytes);
                                         }});
        });
    };
    table_.stream_create = [](stream_handle* stream, unsigned int flags) {
        return calls::outside_capture("cuStreamCreate", [&](fake_driver& self) {
            if (flags != stream_non_blocking) {
                return self.violate(error_invalid_value, "a stream that waits for the default one");
            }
            *stream = &self.streams_.emplace_back();
            (*stream)->context = self.current();
            return success;
        });
    };
    table_.stream_destroy = [](stream_handle stream) {
        return calls::any("cuStreamDestroy_v2", [&](fake_driver& self) {
            if (stream->destroyed)
                return self.violate(error_invalid_handle, "stream destroyed twice");
            stream->destroyed = true;
            return success;
        });
    };
    table_.stream_wait_event = [](stream_handle stream, event_handle event, unsigned int) {
        return calls::in_context("cuStreamWaitEvent", [&](fake_driver& self) {
            return self.enqueue(stream, {"wait", [] {}, event, event->recorded});
        });
    };
    table_.stream_is_capturing = [](stream_handle stream, int* capture_status) {
        return calls::in_context("cuStreamIsCapturing", [&](fake_driver& self) {
            const driver_result checked = self.check_stream(stream, "cuStreamIsCapturing");
            if (checked == success) *capture_status = stream->capturing ? 1 : capture_none;
            return checked;
        });
    };
    table_.exchange_capture_mode = [](int* mode) {
        return calls::any("cuThreadExchangeStreamCaptureMode", [&](fake_driver& self) {
            std::swap(*mode, self.capture_modes_[std::this_thread::get_id()]);
            return success;
        });
    };
    table_.event_create = [](event_handle* event, unsigned int flags) {
        return calls::outside_capture("cuEventCreate", [&](fake_driver& self) {
            if (flags != event_disable_timing && flags != event_default) {
                return self.violate(error_invalid_value, "an event of another kind");
            }
            *event = &self.events_.emplace_back();
            (*event)->context = self.current();
            (*event)->timed = flags == event_default;
            return success;
        });
    };
    table_.event_destroy = [](event_handle event) {
        return calls::any("cuEventDestroy_v2", [&](fake_driver& self) {
            if (event->destroyed)
                return self.violate(error_invalid_handle, "event destroyed twice");
            event->destroyed = true;
            return success;
        });
    };
    table_.event_record = [](event_handle event, stream_handle stream) {
        return calls::in_context("cuEventRecord", [&](fake_driver& self) {
            if (event->destroyed || event->context != self.current()) {
                return self.violate(error_invalid_handle, "event of another context, or destroyed");
            }
            const driver_result checked = self.check_stream(stream, "cuEventRecord");
            if (checked != success) return checked;
            event->captured = stream->capturing;
            if (event->captured) return success;
            const uint64_t count = ++event->recorded;
            return self.enqueue(stream, {"event", [=, &self] {
                                             event->completed = std::max(event->completed, count);
                                             event->time = self.time_;
                                         }});
        });
    };
    table_.event_query = [](event_handle event) {
        return calls::outside_capture("cuEventQuery", [&](fake_driver& self) {
            if (event->captured)
                return self.violate(error_captured_event, "query of a captured event");
            return event->completed >= event->recorded ? success : error_not_ready;
        });
    };
    table_.event_synchronize = [](event_handle event) {
        return calls::outside_capture("cuEventSynchronize", [&](fake_driver& self) {
            return self.synchronise([&] { return event->completed >= event->recorded; },
                                    "cuEventSynchronize");
        });
    };
    table_.event_elapsed = [](float* milliseconds, event_handle start, event_handle end) {
        return calls::outside_capture("cuEventElapsedTime", [&](fake_driver& self) {
            if (!start->timed || !end->timed || start->destroyed || end->destroyed) {
                return self.violate(error_invalid_handle, "the time of an event that takes none");
            }
            for (const event_handle each : {start, end}) {
                if (each->completed < each->recorded) return error_not_ready;
            }
            *milliseconds = static_cast<float>((end->time - start->time) / 1000.0);
            return success;
        });
    };
    table_.launch = [](function_handle function, unsigned int grid_x, unsigned int grid_y,
                       unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                       unsigned int block_z, unsigned int shared_bytes, stream_handle stream,
                       void** parameters, void**) {
        return calls::in_context("cuLaunchKernel", [&](fake_driver& self) {
            const bool empty = grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0;
            if (empty || block_x * block_y * block_z > 1024 ||
                shared_bytes > static_cast<unsigned int>(function->dynamic_shared_bytes)) {
                return self.violate(error_invalid_value, "launch of " + function->name);
            }
            kernel_launch launch{
                {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, {}};
            for (std::size_t i = 0; i < function->parameter_bytes.size(); ++i) {
                const std::byte* value = static_cast<const std::byte*>(parameters[i]);
                launch.parameters.emplace_back(value, value + function->parameter_bytes[i]);
            }
            return self.enqueue(stream, {function->name, [=] { function->body(launch); }});
        });
    };
}

}  // namespace kvrt::cuda
