// How the library finds its CUDA plugin, and what it says where there is none, or another.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "device/plugin_device.hpp"

using namespace kvrt;

extern "C" const kvrt_plugin* kvrt_cuda_plugin(void);

namespace {

std::string message() { return message_buffer(); }

bool message_has(const std::string& part) { return message().find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a plugin of another version is refused, and where it was found is told") {
    const kvrt_plugin good = *kvrt_cuda_plugin();
    CHECK(check_plugin(&good, "/somewhere/plugin.so") == KV_OK);
    CHECK(check_plugin(nullptr, "/somewhere/plugin.so") == KV_UNSUPPORTED);
    CHECK(message_has("/somewhere/plugin.so"));

    kvrt_plugin newer = good;
    newer.version = KVRT_PLUGIN_VERSION + 1;
    CHECK(check_plugin(&newer, "/somewhere/plugin.so") == KV_UNSUPPORTED);
    CHECK(message_has("/somewhere/plugin.so"));
    CHECK(message_has("one release"));
    kvrt_plugin shorter = good;
    shorter.struct_size -= 8;
    CHECK(check_plugin(&shorter, "/somewhere/plugin.so") == KV_UNSUPPORTED);
    kvrt_plugin longer = good;  // it knows more than this library asks for
    longer.struct_size += 8;
    CHECK(check_plugin(&longer, "/somewhere/plugin.so") == KV_OK);
}

TEST_CASE("the plugin's file: absent, something else, or what was built") {
    const kvrt_plugin* plugin = nullptr;
    REQUIRE(setenv("KVRT_CUDA_PLUGIN", "/nowhere/libkvrt_cuda.so", 1) == 0);
    CHECK(load_cuda_plugin(plugin) == KV_UNSUPPORTED);
    CHECK(message_has("/nowhere/libkvrt_cuda.so"));
    CHECK(message_has("CUDA"));

    // Beside this program, and where the system looks: it is in neither place.
    REQUIRE(unsetenv("KVRT_CUDA_PLUGIN") == 0);
    if (load_cuda_plugin(plugin) == KV_OK) {
        MESSAGE("the rest is skipped: a plugin is installed on this machine");
        return;
    }
    CHECK(message_has("; libkvrt_cuda.so.0"));

    REQUIRE(setenv("KVRT_CUDA_PLUGIN", KVRT_SHARED_LIBRARY, 1) == 0);
    CHECK(load_cuda_plugin(plugin) == KV_UNSUPPORTED);
    CHECK(message_has("no plugin"));
    CHECK(plugin == nullptr);

    REQUIRE(setenv("KVRT_CUDA_PLUGIN", KVRT_CUDA_LIBRARY, 1) == 0);
    REQUIRE_MESSAGE(load_cuda_plugin(plugin) == KV_OK, message());
    CHECK(plugin != kvrt_cuda_plugin());  // the file's, not the one in this program
    REQUIRE(unsetenv("KVRT_CUDA_PLUGIN") == 0);
    const kvrt_plugin* again = nullptr;
    CHECK(load_cuda_plugin(again) == KV_OK);
    CHECK(again == plugin);

    host_allocator allocator;
    {
        plugin_device device;
        const status verdict = device.open(*plugin, allocator, false);
        if (verdict == KV_OK) {
            MESSAGE("this machine has a CUDA device");
            CHECK(device.is_open());
        } else {
            CHECK(verdict == KV_UNSUPPORTED);
            CHECK_FALSE(device.is_open());
            CHECK(message().size() > 20);
            MESSAGE("no device here: ", message());
        }
    }
    CHECK(allocator.live_bytes == 0);
}
