#include "device/plugin_device.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <mutex>
#include <string>

namespace kvrt {

namespace {

constexpr const char* plugin_file = "libkvrt_cuda.so.0";

std::mutex plugin_lock;
const kvrt_plugin* loaded_plugin = nullptr;
const kvrt_plugin* replaced_plugin = nullptr;

/// The folder that this library, or the program it is linked into, was loaded from.
std::string own_folder() {
    Dl_info info = {};
    if (dladdr(reinterpret_cast<const void*>(&load_cuda_plugin), &info) == 0) return {};
    const std::string path = info.dli_fname != nullptr ? info.dli_fname : "";
    const std::size_t slash = path.rfind('/');
    return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

/// Is this a program that was linked dynamically? The C library of another crashes when it loads
/// something that was not.
bool has_dynamic_linker() {
    const auto asks_for_one = [](dl_phdr_info* object, std::size_t, void*) {
        for (uint32_t i = 0; i < object->dlpi_phnum; ++i) {
            if (object->dlpi_phdr[i].p_type == PT_INTERP) return 1;
        }
        return 0;
    };
    return dl_iterate_phdr(asks_for_one, nullptr) != 0;
}

/// Null, and why in `reasons`, where nothing can be loaded.
void* open_library(const std::string& path, std::string& reasons) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
    const char* reason = dlerror();
    if (!reasons.empty()) reasons += "; ";
    reasons += reason != nullptr ? reason : path;
    return nullptr;
}

/// Never closed: the plugin's threads and the driver's do not survive that.
status load_plugin(const kvrt_plugin*& out) {
    if (!has_dynamic_linker()) {
        return fail(KV_UNSUPPORTED,
                    "config: device CUDA: this program is linked statically and cannot load {}",
                    plugin_file);
    }
    std::string reasons;
    void* library = nullptr;
    const char* chosen = secure_getenv("KVRT_CUDA_PLUGIN");
    if (chosen != nullptr && *chosen != '\0') {
        library = open_library(chosen, reasons);
    } else {
        const std::string folder = own_folder();
        if (!folder.empty()) library = open_library(folder + plugin_file, reasons);
        if (library == nullptr) library = open_library(plugin_file, reasons);
    }
    if (library == nullptr) {
        return fail(KV_UNSUPPORTED, "config: device CUDA: its plugin was not found: {}", reasons);
    }
    const auto entry = reinterpret_cast<kvrt_plugin_entry>(dlsym(library, KVRT_CUDA_PLUGIN_ENTRY));
    const kvrt_plugin* plugin = entry != nullptr ? entry() : nullptr;
    Dl_info info = {};
    if (entry != nullptr) (void)dladdr(reinterpret_cast<const void*>(entry), &info);
    KVRT_TRY(check_plugin(plugin, info.dli_fname != nullptr ? info.dli_fname : plugin_file));
    out = plugin;
    return KV_OK;
}

}  // namespace

status check_plugin(const kvrt_plugin* plugin, const char* place) {
    if (plugin == nullptr) {
        return fail(KV_UNSUPPORTED, "config: device CUDA: {} is no plugin of this library", place);
    }
    if (plugin->version != KVRT_PLUGIN_VERSION || plugin->struct_size < sizeof(kvrt_plugin)) {
        return fail(KV_UNSUPPORTED,
                    "config: device CUDA: {} has interface {} of {} bytes, this library needs {} "
                    "of {}: install both from one release",
                    place, plugin->version, plugin->struct_size, KVRT_PLUGIN_VERSION,
                    sizeof(kvrt_plugin));
    }
    return KV_OK;
}

void replace_cuda_plugin(const kvrt_plugin* plugin) {
    const std::lock_guard<std::mutex> guard(plugin_lock);
    replaced_plugin = plugin;
}

status load_cuda_plugin(const kvrt_plugin*& out) {
    const std::lock_guard<std::mutex> guard(plugin_lock);
    if (replaced_plugin == nullptr && loaded_plugin == nullptr) {
        KVRT_TRY(load_plugin(loaded_plugin));
    }
    out = replaced_plugin != nullptr ? replaced_plugin : loaded_plugin;
    return KV_OK;
}

plugin_device::~plugin_device() {
    if (device_ != nullptr) plugin_->close(device_);
}

namespace {

status tell(const kvrt_plugin& plugin, status verdict) {
    const char* message = plugin.last_message();
    // A plugin that is linked in has left it where it belongs.
    if (verdict >= 0 || message == message_buffer()) return verdict;
    return fail(verdict, "{}", message);
}

}  // namespace

status describe_device(const kvrt_plugin& plugin, kvrt_device_description& out) {
    return tell(plugin, plugin.describe(&out));
}

status plugin_device::told(status verdict) const { return tell(*plugin_, verdict); }

status plugin_device::open(const kvrt_plugin& plugin, host_allocator& allocator, bool elastic,
                           const device_allocator& of_device) {
    plugin_ = &plugin;
    kvrt_device_options options = {};
    options.struct_size = sizeof options;
    options.elastic = elastic ? 1 : 0;
    options.allocator = &allocator;
    options.allocate = [](void* from, std::size_t bytes, std::size_t alignment) {
        return kvrt::allocate(*static_cast<host_allocator*>(from), bytes, alignment,
                              memory_contents::undefined);
    };
    options.release = [](void* to, void* memory, std::size_t bytes, std::size_t alignment) {
        kvrt::release(*static_cast<host_allocator*>(to), memory, bytes, alignment);
    };
    options.device_user = of_device.user;
    options.allocate_device = of_device.allocate;
    options.release_device = of_device.release;
    return told(plugin.open(&options, &device_));
}

status plugin_device::reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) {
    void* base = nullptr;
    KVRT_TRY(told(plugin_->reserve(device_, bytes, alignment, &base)));
    *out_base = static_cast<std::byte*>(base);
    return KV_OK;
}

status plugin_device::commit(uint64_t offset, uint64_t bytes) {
    return told(plugin_->commit(device_, offset, bytes));
}

void plugin_device::give_back(uint64_t offset, uint64_t bytes) {
    plugin_->give_back(device_, offset, bytes);
}

void plugin_device::fill(uint64_t offset, uint64_t bytes, unsigned char value) {
    plugin_->fill(device_, offset, bytes, value);
}

status plugin_device::read(uint64_t first, uint64_t stride, uint64_t count, uint64_t bytes,
                           std::byte* out) {
    return told(plugin_->read(device_, first, stride, count, bytes, out));
}

status plugin_device::begin_step(uint64_t step, void* stream) {
    return told(plugin_->begin_step(device_, step, stream));
}

status plugin_device::end_step(uint64_t step) { return told(plugin_->end_step(device_, step)); }

status plugin_device::poll() { return told(plugin_->poll(device_)); }

bool plugin_device::passed(uint64_t step) const { return plugin_->passed(device_, step) != 0; }

status plugin_device::copy(uint64_t step, uint64_t target, uint64_t source, uint64_t bytes) {
    return told(plugin_->copy(device_, step, target, source, bytes));
}

status plugin_device::create_table(uint64_t words, uint64_t staging_bytes, std::byte** out_address,
                                   const uint32_t** out_image) {
    void* address = nullptr;
    KVRT_TRY(told(plugin_->create_table(device_, words, staging_bytes, &address, out_image)));
    *out_address = static_cast<std::byte*>(address);
    return KV_OK;
}

status plugin_device::upload_table(uint64_t step) {
    return told(plugin_->upload_table(device_, step));
}

status plugin_device::create_workspace(uint64_t bytes, std::byte** out_address) {
    void* address = nullptr;
    KVRT_TRY(told(plugin_->create_workspace(device_, bytes, &address)));
    *out_address = static_cast<std::byte*>(address);
    return KV_OK;
}

}  // namespace kvrt
