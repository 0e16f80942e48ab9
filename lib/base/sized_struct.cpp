#include "base/sized_struct.hpp"

namespace kvrt {

status check_struct(const void* user, uint32_t known_size, uint32_t known_flags, const char* name) {
    if (user == nullptr) return fail(KV_INVALID, "{} is NULL", name);
    kv_struct_header header;
    std::memcpy(&header, user, sizeof header);
    if (header.struct_size < sizeof header || header.struct_size > max_struct_size) {
        return fail(KV_INVALID, "{}: struct_size is {}, this library knows {}: start from KV_INIT",
                    name, header.struct_size, known_size);
    }
    if (header.next != nullptr) {
        return fail(KV_UNSUPPORTED, "{}: next must be NULL, this library knows no extension", name);
    }
    if ((header.flags & ~known_flags) != 0) {
        return fail(KV_UNSUPPORTED, "{}: flags {:#x} are unknown to this library", name,
                    header.flags & ~known_flags);
    }
    const auto* bytes = static_cast<const unsigned char*>(user);
    for (uint32_t i = known_size; i < header.struct_size; ++i) {
        if (bytes[i] != 0) {
            return fail(KV_UNSUPPORTED,
                        "{}: byte {} of {} is set, this library knows only the first {}", name, i,
                        header.struct_size, known_size);
        }
    }
    return KV_OK;
}

}  // namespace kvrt
