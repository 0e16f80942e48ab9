// One pass of the model over sequences of several caches.
//
// All rows go through the matrices together, whatever cache they belong to. Sequences that have
// read the same and still hold all of it have the same queries, keys and values: one of them is
// read, the others go beside it, store the same rows and see the same queries, and cost their
// attention alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "evaluate/configuration.hpp"
#include "llama.hpp"

namespace evaluate {

struct cached_sequence {
    std::size_t cache = 0;  // index among the reader's
    kv_seq sequence = 0;
};

struct batch_item {
    cached_sequence read;
    std::vector<cached_sequence> beside;
    std::span<const generate::token_id> tokens;
    std::size_t first_logits = 0;  // logits of rows from here on are wanted, up to
    std::size_t end_logits = 0;    // here
};

class batch_reader : public generate::attention_cache {
  public:
    // Model and caches must outlive the object. `most_rows` go into one pass.
    batch_reader(const generate::llama_model& model, std::span<generate::kv_cache> caches,
                 std::size_t most_rows);

    // One step of every cache that has a part in it. Returns the logits wanted, item by item, until
    // the next call.
    outcome<std::span<const float>> read(std::span<const batch_item> items);

    // Of the last read: what each item's sequence held while the step was open.
    std::span<const std::uint64_t> reserved_bytes() const { return reserved_bytes_; }
    std::size_t most_rows() const { return most_rows_; }
    std::size_t vocabulary() const { return vocabulary_; }
    std::span<generate::kv_cache> caches() { return caches_; }

    outcome<nothing> attend(std::uint32_t layer, const generate::attention_rows& rows) override;
    // All caches rotate, or none does.
    bool rotates() const override { return caches_.front().rotates(); }

  private:
    // Rows of one sequence in the step of its cache.
    struct part {
        kv_seq sequence;
        std::span<const generate::token_id> tokens;
        std::size_t first;  // row of the pass
        bool is_read;
    };

    outcome<nothing> begin(std::span<const batch_item> items);
    outcome<nothing> begin_step(std::size_t cache);

    std::span<generate::kv_cache> caches_;
    std::size_t vocabulary_;
    std::size_t most_rows_;
    std::size_t query_size_;
    std::size_t row_size_;  // query, key and value
    generate::forward_pass pass_;
    std::vector<std::vector<part>> parts_;  // of each cache
    std::vector<generate::token_id> tokens_;
    std::vector<std::uint32_t> positions_;
    std::vector<std::uint32_t> logits_rows_;
    std::vector<std::uint64_t> reserved_bytes_;
    std::vector<float> logits_;
    std::vector<float> gathered_;  // [rows of a step, query + key + value]
    std::vector<float> attended_;  // [rows of a step, query]
};

// As many items together as a pass takes rows; `use` gets the index of the first one of each pass,
// their number and their logits.
template <class callable>
outcome<nothing> read_all(batch_reader& reader, std::span<const batch_item> items,
                          const callable& use) {
    for (std::size_t first = 0; first < items.size();) {
        std::size_t count = 1;
        std::size_t rows = items[first].tokens.size();
        while (first + count < items.size() &&
               rows + items[first + count].tokens.size() <= reader.most_rows()) {
            rows += items[first + count].tokens.size();
            ++count;
        }
        const auto logits = reader.read(items.subspan(first, count));
        if (!logits) {
            return logits.failure();
        }
        if (auto done = use(first, count, *logits); !done) {
            return done;
        }
        first += count;
    }
    return nothing{};
}

// Reads tokens in chunks, without logits.
outcome<nothing> read_in_chunks(batch_reader& reader, const cached_sequence& read,
                                std::span<const cached_sequence> beside,
                                std::span<const generate::token_id> tokens, std::size_t chunk);

}  // namespace evaluate
