#include "driver/table.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvrt::cuda {

namespace {

/// So many runs of lines are copied one by one: each costs a call, as the kernel does.
constexpr uint32_t most_copied_runs = 4;
constexpr uint64_t no_line = ~uint64_t{0};
constexpr uint32_t nothing = 0xffffffffu;

uint64_t spread_bytes(uint64_t count) {
    return kernels::spread_words_at(count) + count * line_bytes;
}

/// As memcmp would say, in a few instructions: most of what is written is a whole line.
bool same_line(const uint32_t* a, const uint32_t* b) {
    uint32_t different = 0;
    for (uint32_t i = 0; i < line_words; ++i) different |= a[i] ^ b[i];
    return different == 0;
}

/// How many lines' entries fit in so many bytes.
uint64_t lines_that_fit(uint64_t bytes) {
    uint64_t count = bytes / (line_bytes + sizeof(uint32_t));
    while (count != 0 && spread_bytes(count) > bytes) --count;
    return count;
}

}  // namespace

device_table::~device_table() {
    if (memory_ == 0) return;
    const current_context here(*device_);
    device_->release(memory_, image_.size() * sizeof(uint32_t));
}

status device_table::create(device_context& device, host_allocator& allocator, uint64_t words,
                            function_handle spread) {
    device_ = &device;
    spread_ = spread;
    const uint64_t lines = ceil_divide<uint64_t>(words, line_words);
    if (lines > 0xffffffffu) {
        return fail(KV_TOO_LARGE, "a table of {} words: line numbers have 32 bits", words);
    }
    KVRT_TRY(image_.allocate(allocator, lines * line_words, "image of device tables",
                             memory_contents::undefined));
    KVRT_TRY(marks_.allocate(allocator, ceil_divide<uint64_t>(lines, 64), "marks of tables"));
    KVRT_TRY(
        groups_.allocate(allocator, ceil_divide<uint64_t>(marks_.size(), 64), "marks of tables"));
    const current_context here(device);
    KVRT_TRY(here.state());
    KVRT_TRY(device.allocate(lines * line_bytes, "cuMemAlloc (tables)", memory_));
    std::fill(image_.begin(), image_.end(), nothing);
    return KV_OK;
}

void device_table::write(uint64_t first, const uint32_t* words, uint64_t count) {
    const uint64_t end = first + count;
    for (uint64_t at = first; at < end;) {
        const uint64_t line = at / line_words;
        const uint64_t here = std::min((line + 1) * line_words, end) - at;
        const uint32_t* const source = words + (at - first);
        uint32_t* const target = image_.data() + at;
        // A part of a line is written without a look at what is there: it is mostly new, and far
        // from all that is in the processor's caches.
        if (here != line_words || !same_line(target, source)) {
            std::memcpy(target, source, here * sizeof(uint32_t));
            mark(line);
        }
        at += here;
    }
}

void device_table::forget(uint64_t first, uint64_t count) {
    std::fill_n(image_.data() + first, count, nothing);
    for (uint64_t line = first / line_words; line * line_words < first + count; ++line) mark(line);
}

void device_table::mark(uint64_t line) {
    uint64_t& marks = marks_[line / 64];
    const uint64_t own = uint64_t{1} << line % 64;
    if ((marks & own) == 0) ++pending_;
    marks |= own;
    groups_[line / 64 / 64] |= uint64_t{1} << line / 64 % 64;
}

/// The first pending line at `from` or behind it.
uint64_t device_table::find_line(uint64_t from) const {
    uint64_t word = from / 64;
    if (word >= marks_.size()) return no_line;
    const uint64_t here = marks_[word] >> from % 64 << from % 64;
    if (here != 0) return word * 64 + static_cast<uint64_t>(std::countr_zero(here));
    ++word;
    for (uint64_t group = word / 64; group < groups_.size(); ++group) {
        const uint32_t skipped = group == word / 64 ? word % 64 : 0;
        const uint64_t words = groups_[group] >> skipped << skipped;
        if (words == 0) continue;
        word = group * 64 + static_cast<uint64_t>(std::countr_zero(words));
        return word * 64 + static_cast<uint64_t>(std::countr_zero(marks_[word]));
    }
    return no_line;
}

uint32_t device_table::runs_up_to(uint32_t most) const {
    uint32_t runs = 0;
    for (uint64_t line = find_line(0); line != no_line && runs < most; ++runs) {
        uint64_t next = find_line(line + 1);
        while (next == line + 1) {
            line = next;
            next = find_line(line + 1);
        }
        line = next;
    }
    return runs;
}

/// The device's own words become what the image began with.
status device_table::begin(stream_handle stream) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(check_stream(*device_, stream, "upload"));
    KVRT_TRY(device_->check(
        device_->calls().fill_bytes(memory_, 0xff, image_.size() * sizeof(uint32_t), stream),
        "cuMemsetD8Async (tables)"));
    begun_ = true;
    return KV_OK;
}

status device_table::upload(staging_ring& ring, stream_handle stream) {
    if (!begun_) KVRT_TRY(begin(stream));
    while (pending_ != 0) {
        const bool copies =
            spread_ == nullptr || runs_up_to(most_copied_runs + 1) <= most_copied_runs;
        KVRT_TRY(copies ? copy_runs(ring, stream) : spread_lines(ring, stream));
    }
    return KV_OK;
}

/// One batch of copies, as far as the ring has room.
status device_table::copy_runs(staging_ring& ring, stream_handle stream) {
    const uint64_t wanted = pending_ * line_bytes;
    KVRT_TRY(ring.open(std::min(wanted, ring.bytes() / 4), wanted, stream));
    const uint64_t room = ring.size() / line_bytes;
    uint64_t used = 0;
    status verdict = KV_OK;
    for (uint64_t line = find_line(0); line != no_line && used < room && verdict == KV_OK;
         line = find_line(line)) {
        uint64_t end = line;
        while (end - line < room - used && find_line(end) == end) ++end;
        const uint64_t bytes = (end - line) * line_bytes;
        std::memcpy(ring.data() + used * line_bytes, image_.data() + line * line_words, bytes);
        verdict = ring.copy(memory_ + line * line_bytes, used * line_bytes, bytes);
        used += end - line;
        for (; verdict == KV_OK && line < end; ++line) unmark(line);
    }
    const status closed = ring.close(used * line_bytes);
    return verdict == KV_OK ? closed : verdict;
}

/// One batch for the kernel, as large as the ring has room for.
status device_table::spread_lines(staging_ring& ring, stream_handle stream) {
    const uint64_t wanted = spread_bytes(pending_);
    KVRT_TRY(ring.open(std::min(wanted, ring.bytes() / 4), wanted, stream));
    const uint64_t count = std::min(pending_, lines_that_fit(ring.size()));
    std::byte* const words = ring.data() + kernels::spread_words_at(count);
    uint64_t line = find_line(0);
    for (uint64_t i = 0; i < count; ++i, line = find_line(line + 1)) {
        const uint32_t number = static_cast<uint32_t>(line);
        std::memcpy(ring.data() + i * sizeof number, &number, sizeof number);
        std::memcpy(words + i * line_bytes, image_.data() + line * line_words, line_bytes);
    }
    status verdict = ring.copy(ring.on_device(0), 0, spread_bytes(count));
    if (verdict == KV_OK) verdict = launch_spread(ring, stream, static_cast<uint32_t>(count));
    for (uint64_t i = 0; verdict == KV_OK && i < count; ++i) {
        uint32_t number;
        std::memcpy(&number, ring.data() + i * sizeof number, sizeof number);
        unmark(number);
    }
    const status closed = ring.close(spread_bytes(count));
    return verdict == KV_OK ? closed : verdict;
}

status device_table::launch_spread(staging_ring& ring, stream_handle stream, uint32_t count) {
    kernels::spread_parameters call{reinterpret_cast<uint32_t*>(memory_),
                                    reinterpret_cast<const std::byte*>(ring.on_device(0)), count};
    void* parameters[] = {&call};
    const current_context here(*device_);
    KVRT_TRY(here.state());
    return device_->check(
        device_->calls().launch(spread_, kernels::spread_blocks(count), 1, 1,
                                kernels::spread_threads, 1, 1, 0, stream, parameters, nullptr),
        "cuLaunchKernel (spread_lines)");
}

/// The line is on its way.
void device_table::unmark(uint64_t line) {
    uint64_t& marks = marks_[line / 64];
    marks &= ~(uint64_t{1} << line % 64);
    if (marks == 0) groups_[line / 64 / 64] &= ~(uint64_t{1} << line / 64 % 64);
    --pending_;
}

}  // namespace kvrt::cuda
