// Words of the device that the host reads back, in pieces that always find room on their way.
#pragma once

#include <algorithm>

#include "step/step.hpp"

namespace kvrt {

class word_pieces {
  public:
    /// For so many words in all, in so many runs.
    status allocate(host_allocator& allocator, uint64_t words, uint64_t runs) {
        return list_.allocate(allocator, words / piece_words + runs, "words of a device");
    }
    void add(const uint32_t* from, uint64_t words) {
        for (uint64_t at = 0; at < words; at += piece_words) {
            list_[count_++] = {from + at, std::min(piece_words, words - at)};
        }
    }
    /// One run behind the other; waits for the device.
    status read(step_context& context, uint32_t* out) const {
        cache& store = *context.store;
        const uint64_t number = ++store.fences.last_begun;
        KVRT_TRY(store.device.open_round(number));
        const status verdict = store.device.read_words(number, list_.data(), count_, out);
        const status ended = store.device.end_step(number);
        return verdict < 0 ? verdict : ended;
    }

  private:
    static constexpr uint64_t piece_words = uint64_t{4} << 10;
    host_array<kvrt_words> list_;
    uint64_t count_ = 0;
};

}  // namespace kvrt
