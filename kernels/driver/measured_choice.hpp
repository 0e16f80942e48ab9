// Which of two ways is faster on this device, by kinds of work: each is timed a few times, by
// events around it, as the work comes; then the faster one is taken, for good. Nobody waits: an
// event that has not completed when more work comes is asked again later, and meanwhile nothing is
// timed.
#pragma once

#include <array>

#include "driver/context.hpp"

namespace kvrt::cuda {

class measured_choice {
  public:
    static constexpr uint32_t capacity = 32;  ///< kinds of work
    static constexpr uint32_t trials = 3;     ///< of each way; the fastest counts
    static constexpr uint32_t ways = 2;

    /// What is as fast as each other: by what is multiplied, and how much of it, in powers of 2.
    struct kind {
        uint32_t codes = 0, type = 0, inner = 0, columns = 0, size = 0;
        bool operator==(const kind&) const = default;
    };
    /// Work that has begun.
    struct trial {
        uint32_t entry = 0;
        uint32_t way = 0;
        bool timed = false;
    };
    /// How many kinds are which way's, and how many are still being timed.
    struct verdicts {
        uint32_t chosen[ways] = {}, open = 0;
    };

    measured_choice() = default;
    measured_choice(const measured_choice&) = delete;
    measured_choice& operator=(const measured_choice&) = delete;
    /// Nothing that it timed is in flight any more.
    ~measured_choice();

    void use(device_context& device) { device_ = &device; }

    /// The way that some work goes: 0 where there is nothing to know yet.
    status begin(const kind& of, stream_handle stream, trial& out);
    /// Behind the work.
    status end(const trial& work, stream_handle stream);
    /// The other way cannot do this work: the kind is way 0's from now on.
    void rule_out(const trial& work);

    verdicts count() const;

  private:
    struct entry {
        kind of;
        event_handle start = nullptr, end = nullptr;
        float best[ways] = {};  ///< milliseconds
        uint32_t timed[ways] = {};
        uint32_t way = 0;  ///< chosen, or under way
        bool decided = false;
        bool waiting = false;  ///< for the events of `way`
        uint64_t used = 0;     ///< when, for the entry that gives way; 0: empty
    };

    status find(const kind& of, entry*& out);
    status ask(entry& about);

    device_context* device_ = nullptr;
    std::array<entry, capacity> entries_;
    uint64_t clock_ = 0;
};

}  // namespace kvrt::cuda
