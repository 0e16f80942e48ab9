#include "retention/statistics_file.hpp"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <cstring>

namespace kvrt {

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

namespace {

constexpr char magic[8] = {'K', 'V', 'R', 'T', 'Q', 'S', 'T', '1'};
constexpr uint32_t version = 2;
constexpr uint32_t covariances_flag = 1;
constexpr uint64_t header_bytes = 24, layer_header_bytes = 40, trailer_bytes = 8;

uint64_t length_of(const layer_statistics& layer) {
    return uint64_t{layer.query_heads} * layer.rope->bands(layer.key_dim);
}

/// Arrays of a layer, in order.
constexpr uint32_t arrays_in(uint32_t file_version) { return file_version == 1 ? 3 : 6; }

struct array_list {
    float* array[arrays_in(version)];
};
array_list arrays_of(const query_moments<float>& moments) {
    return {{moments.mean_real, moments.mean_imaginary, moments.mean_magnitude,
             moments.variance_real, moments.variance_imaginary, moments.covariance}};
}

uint64_t layer_bytes(const layer_statistics& layer, uint32_t file_version) {
    return layer_header_bytes + layer.rope->rotated_bands() * sizeof(double) +
           arrays_in(file_version) * length_of(layer) * sizeof(float);
}

uint64_t file_bytes(const layer_statistics* layers, uint32_t layer_count, uint32_t file_version) {
    uint64_t bytes = header_bytes + trailer_bytes;
    for (uint32_t i = 0; i < layer_count; ++i) bytes += layer_bytes(layers[i], file_version);
    return bytes;
}

struct writer {
    std::byte* next;

    template <class number>
    void put(const number& value) {
        std::memcpy(next, &value, sizeof value);
        next += sizeof value;
    }
    void put_floats(const float* values, uint64_t count) {
        if (values != nullptr) {
            std::memcpy(next, values, count * sizeof(float));
        } else {
            std::memset(next, 0, count * sizeof(float));
        }
        next += count * sizeof(float);
    }
};

/// The file's size was checked against the geometry, so reading cannot run over the end.
struct reader {
    const std::byte* next;

    template <class number>
    number take() {
        number value;
        std::memcpy(&value, next, sizeof value);
        next += sizeof value;
        return value;
    }
};

/// What one layer's part says, beside what was expected.
struct found_layer {
    const std::byte* arrays = nullptr;
    uint64_t tokens = 0;
    bool covariances = false;
};

/// Checks one layer's part; leaves `file` behind it.
status check_layer(reader& file, const layer_statistics& expected, uint32_t layer,
                   uint32_t file_version, found_layer& found_part) {
    const uint32_t fields[] = {expected.query_heads, expected.key_dim,
                               expected.rope->bands(expected.key_dim), expected.rope->style,
                               expected.rope->dimensions};
    constexpr const char* names[] = {"query_heads", "key_dim", "bands", "rope style",
                                     "rope dimensions"};
    for (int i = 0; i < 5; ++i) {
        const uint32_t found = file.take<uint32_t>();
        if (found != fields[i]) {
            return fail(KV_CORRUPT, "statistics file: layer {}: {} is {}, the model has {}", layer,
                        names[i], found, fields[i]);
        }
    }
    const uint32_t flags = file.take<uint32_t>();
    const uint32_t known_flags = file_version == 1 ? 0 : covariances_flag;
    if ((flags & ~known_flags) != 0) {
        return fail(KV_CORRUPT, "statistics file: layer {}: flags {}", layer, flags);
    }
    found_part.covariances = (flags & covariances_flag) != 0;
    const uint64_t tokens = found_part.tokens = file.take<uint64_t>();
    rope_description rope;
    rope.style = expected.rope->style;
    rope.dimensions = expected.rope->dimensions;
    rope.attention_factor = file.take<double>();
    for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
        rope.inverse_frequencies[band] = file.take<double>();
    }
    if (!same_rotation(rope, *expected.rope)) {
        return fail(KV_CORRUPT,
                    "statistics file: layer {}: attention factor or frequencies differ from the "
                    "model's",
                    layer);
    }
    found_part.arrays = file.next;
    const uint64_t length = length_of(expected);
    for (uint32_t array = 0; array < arrays_in(file_version); ++array) {
        const bool never_negative = array >= 2 && array < 5;  // magnitudes and variances
        const bool nothing = tokens == 0 || (array >= 3 && !found_part.covariances);
        for (uint64_t i = 0; i < length; ++i) {
            const float value = file.take<float>();
            if (!std::isfinite(value) || (never_negative && value < 0.0f) ||
                (nothing && value != 0.0f)) {
                return fail(KV_CORRUPT,
                            "statistics file: layer {}: a mean or variance is not possible", layer);
            }
        }
    }
    return KV_OK;
}

/// Zeroed pages that are not from any allocator a host counts.
struct pages {
    void* memory = MAP_FAILED;
    uint64_t bytes;

    explicit pages(uint64_t size) : bytes(size) {
        memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    ~pages() {
        if (memory != MAP_FAILED) munmap(memory, bytes);
    }
    pages(const pages&) = delete;
    pages& operator=(const pages&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(memory); }
};

struct open_file {
    int descriptor = -1;

    ~open_file() {
        if (descriptor >= 0) close(descriptor);
    }
};

/// All of it, or the errno.
int write_all(int descriptor, const std::byte* data, uint64_t bytes) {
    while (bytes > 0) {
        const ssize_t written = write(descriptor, data, bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        data += written;
        bytes -= static_cast<uint64_t>(written);
    }
    return 0;
}

/// Reads up to `bytes`; the count read, or -errno.
int64_t read_all(int descriptor, std::byte* data, uint64_t bytes) {
    uint64_t total = 0;
    while (total < bytes) {
        const ssize_t got = read(descriptor, data + total, bytes - total);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        total += static_cast<uint64_t>(got);
    }
    return static_cast<int64_t>(total);
}

}  // namespace

uint64_t statistics_bytes(const layer_statistics* layers, uint32_t layer_count) {
    return file_bytes(layers, layer_count, version);
}

void encode_statistics(const layer_statistics* layers, uint32_t layer_count, std::byte* out) {
    writer file{out};
    file.put(magic);
    file.put(version);
    file.put(layer_count);
    file.put(statistics_bytes(layers, layer_count));
    for (uint32_t i = 0; i < layer_count; ++i) {
        const layer_statistics& layer = layers[i];
        const rope_description& rope = *layer.rope;
        file.put(layer.query_heads);
        file.put(layer.key_dim);
        file.put(rope.bands(layer.key_dim));
        file.put(rope.style);
        file.put(rope.dimensions);
        const bool any = layer.tokens != 0;
        const bool covariances = any && layer.moments.has_covariances();
        file.put(covariances ? covariances_flag : 0u);
        file.put(layer.tokens);
        file.put(rope.attention_factor);
        for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
            file.put(rope.inverse_frequencies[band]);
        }
        const uint64_t length = length_of(layer);
        for (const float* array : arrays_of(layer.moments).array) {
            file.put_floats(any ? array : nullptr, length);
        }
    }
    file.put(uint64_t{XXH3_64bits(out, static_cast<std::size_t>(file.next - out))});
}

status decode_statistics(const std::byte* data, uint64_t bytes, layer_statistics* layers,
                         uint32_t layer_count) {
    if (bytes < header_bytes + trailer_bytes || std::memcmp(data, magic, sizeof magic) != 0) {
        return fail(KV_CORRUPT, "statistics file: this is no statistics file of this library");
    }
    reader file{data + sizeof magic};
    const uint32_t found_version = file.take<uint32_t>();
    if (found_version == 0 || found_version > version) {
        return fail(KV_CORRUPT, "statistics file: version {}, this library reads up to {}",
                    found_version, version);
    }
    const uint64_t expected = file_bytes(layers, layer_count, found_version);
    const uint32_t found_layers = file.take<uint32_t>();
    const uint64_t found_bytes = file.take<uint64_t>();
    if (found_layers != layer_count || found_bytes != expected || bytes != expected) {
        return fail(KV_CORRUPT,
                    "statistics file: {} layers in {} bytes, of which {} are there; for this model "
                    "it would be {} layers in {} bytes",
                    found_layers, found_bytes, bytes, layer_count, expected);
    }
    reader trailer{data + bytes - trailer_bytes};
    if (trailer.take<uint64_t>() !=
        XXH3_64bits(data, static_cast<std::size_t>(bytes - trailer_bytes))) {
        return fail(KV_CORRUPT, "statistics file: the checksum does not match");
    }
    // Once to check, once to take: nothing is filled before everything is known to be right.
    const std::byte* const first_layer = file.next;
    for (const bool take : {false, true}) {
        file.next = first_layer;
        for (uint32_t i = 0; i < layer_count; ++i) {
            found_layer part;
            KVRT_TRY(check_layer(file, layers[i], i, found_version, part));
            if (!take) continue;
            layers[i].tokens = part.tokens;
            layers[i].has_covariances = part.covariances;
            const uint64_t length = length_of(layers[i]);
            const array_list targets = arrays_of(layers[i].moments);
            for (uint32_t array = 0; length != 0 && array < std::size(targets.array); ++array) {
                if (array < arrays_in(found_version)) {
                    std::memcpy(targets.array[array], part.arrays + array * length * sizeof(float),
                                length * sizeof(float));
                } else {
                    std::memset(targets.array[array], 0, length * sizeof(float));
                }
            }
        }
    }
    return KV_OK;
}

status save_statistics(const layer_statistics* layers, uint32_t layer_count, const char* path) {
    const pages buffer(statistics_bytes(layers, layer_count));
    if (buffer.memory == MAP_FAILED) {
        return fail(KV_NO_MEMORY, "statistics file: the system refused {} bytes", buffer.bytes);
    }
    encode_statistics(layers, layer_count, buffer.data());

    // Written beside the target and renamed, so that a reader sees the old file or the whole new.
    // A link is followed; what is no file, such as a device, is left alone.
    char target[PATH_MAX];
    if (std::strlen(path) >= sizeof target) {
        return fail(KV_INVALID, "path: longer than {} bytes", sizeof target - 1);
    }
    if (realpath(path, target) == nullptr) {
        if (errno != ENOENT) {
            return fail(KV_IO, "{}: {}", path, std::strerror(errno));
        }
        std::strcpy(target, path);
    }
    struct stat existing;
    if (stat(target, &existing) == 0 && !S_ISREG(existing.st_mode)) {
        return fail(KV_IO, "{}: is there already, and is not a file", path);
    }
    char temporary[PATH_MAX + 32];
    snprintf(temporary, sizeof temporary, "%s.%ld.tmp", target, long{getpid()});
    open_file file;
    file.descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file.descriptor < 0) {
        return fail(KV_IO, "{}: cannot be created: {}", path, std::strerror(errno));
    }
    int error = write_all(file.descriptor, buffer.data(), buffer.bytes);
    if (error == 0 && fsync(file.descriptor) != 0) error = errno;
    if (error == 0 && rename(temporary, target) != 0) error = errno;
    if (error != 0) {
        unlink(temporary);
        return fail(KV_IO, "{}: cannot be written: {}", path, std::strerror(error));
    }
    return KV_OK;
}

status load_statistics(const char* path, layer_statistics* layers, uint32_t layer_count) {
    open_file file;
    file.descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (file.descriptor < 0)
        return fail(KV_IO, "{}: cannot be opened: {}", path, std::strerror(errno));
    // One byte more than expected shows a file that is too long; whatever its size, no more is
    // read.
    const pages buffer(statistics_bytes(layers, layer_count) + 1);
    if (buffer.memory == MAP_FAILED) {
        return fail(KV_NO_MEMORY, "statistics file: the system refused {} bytes", buffer.bytes);
    }
    const int64_t got = read_all(file.descriptor, buffer.data(), buffer.bytes);
    if (got < 0)
        return fail(KV_IO, "{}: cannot be read: {}", path, std::strerror(static_cast<int>(-got)));
    return decode_statistics(buffer.data(), static_cast<uint64_t>(got), layers, layer_count);
}

}  // namespace kvrt
