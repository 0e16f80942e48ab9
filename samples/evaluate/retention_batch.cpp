#include "evaluate/retention_batch.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kv_cache.hpp"

namespace evaluate {

using generate::attention_rows;
using generate::kv_cache;

batch_reader::batch_reader(const generate::llama_model& model, std::span<kv_cache> caches,
                           std::size_t most_rows)
    : caches_(caches),
      vocabulary_(model.config.vocabulary),
      most_rows_(most_rows),
      query_size_(model.config.query_size()),
      row_size_(query_size_ + 2 * std::size_t{model.config.kv_size()}),
      pass_(model, most_rows),
      parts_(caches.size()) {}

outcome<std::span<const float>> batch_reader::read(std::span<const batch_item> items) {
    if (auto begun = begin(items); !begun) {
        return begun.failure();
    }
    if (logits_.size() < logits_rows_.size() * vocabulary_) {
        logits_.resize(logits_rows_.size() * vocabulary_);
    }
    const auto logits = std::span(logits_).first(logits_rows_.size() * vocabulary_);
    if (auto done = pass_.run({tokens_, positions_, logits_rows_}, *this, logits); !done) {
        return done.failure();
    }
    for (std::size_t cache = 0; cache < caches_.size(); ++cache) {
        if (parts_[cache].empty()) {
            continue;
        }
        if (const auto ended = caches_[cache].end(); !ended) {
            return ended.failure();
        }
    }
    return std::span<const float>(logits);
}

outcome<nothing> batch_reader::begin(std::span<const batch_item> items) {
    tokens_.clear();
    logits_rows_.clear();
    reserved_bytes_.clear();
    for (auto& parts : parts_) {
        parts.clear();
    }
    for (const batch_item& one : items) {
        const std::size_t first = tokens_.size();
        tokens_.insert(tokens_.end(), one.tokens.begin(), one.tokens.end());
        parts_[one.read.cache].push_back({one.read.sequence, one.tokens, first, true});
        for (const cached_sequence& other : one.beside) {
            parts_[other.cache].push_back({other.sequence, one.tokens, first, false});
        }
        for (std::size_t row = one.first_logits; row < one.end_logits; ++row) {
            logits_rows_.push_back(static_cast<std::uint32_t>(first + row));
        }
    }
    positions_.resize(tokens_.size());
    for (std::size_t cache = 0; cache < caches_.size(); ++cache) {
        if (parts_[cache].empty()) {
            continue;
        }
        if (auto begun = begin_step(cache); !begun) {
            return begun;
        }
    }
    for (const batch_item& one : items) {
        const auto info = caches_[one.read.cache].info(one.read.sequence);
        if (!info) {
            return info.failure();
        }
        reserved_bytes_.push_back(info->bytes);
    }
    return nothing{};
}

outcome<nothing> batch_reader::begin_step(std::size_t cache) {
    std::vector<kv_cache::item> step;
    for (const part& one : parts_[cache]) {
        step.push_back({one.sequence, one.tokens});
    }
    const auto positions = caches_[cache].begin(step);
    if (!positions) {
        return positions.failure();
    }
    std::size_t row = 0;
    for (const part& one : parts_[cache]) {
        if (one.is_read) {
            std::copy_n(positions->begin() + static_cast<std::ptrdiff_t>(row), one.tokens.size(),
                        positions_.begin() + static_cast<std::ptrdiff_t>(one.first));
        }
        row += one.tokens.size();
    }
    return nothing{};
}

outcome<nothing> batch_reader::attend(std::uint32_t layer, const attention_rows& rows) {
    const std::size_t key_value_size = (row_size_ - query_size_) / 2;
    for (std::size_t cache = 0; cache < caches_.size(); ++cache) {
        std::size_t count = 0;
        for (const part& one : parts_[cache]) {
            count += one.tokens.size();
        }
        if (count == 0) {
            continue;
        }
        gathered_.resize(std::max(gathered_.size(), count * row_size_));
        attended_.resize(std::max(attended_.size(), count * query_size_));
        float* to = gathered_.data();
        for (const part& one : parts_[cache]) {
            for (std::size_t row = one.first; row < one.first + one.tokens.size(); ++row) {
                const std::size_t from = row * rows.row_stride;
                to = std::copy_n(rows.queries + from, query_size_, to);
                to = std::copy_n(rows.keys + from, key_value_size, to);
                to = std::copy_n(rows.values + from, key_value_size, to);
            }
        }
        attention_rows step;
        step.rows = count;
        step.row_stride = row_size_;
        step.queries = gathered_.data();
        step.keys = step.queries + query_size_;
        step.values = step.keys + key_value_size;
        step.out = attended_.data();
        if (auto done = caches_[cache].attend(layer, step); !done) {
            return done;
        }
        const float* attended = attended_.data();
        for (const part& one : parts_[cache]) {
            if (one.is_read) {
                std::copy_n(attended, one.tokens.size() * query_size_,
                            rows.out + one.first * query_size_);
            }
            attended += one.tokens.size() * query_size_;
        }
    }
    return nothing{};
}

outcome<nothing> read_in_chunks(batch_reader& reader, const cached_sequence& read,
                                std::span<const cached_sequence> beside,
                                std::span<const generate::token_id> tokens, std::size_t chunk) {
    while (!tokens.empty()) {
        const batch_item item = {read,
                                 {beside.begin(), beside.end()},
                                 tokens.first(std::min(chunk, tokens.size())),
                                 0,
                                 0};
        if (const auto done = reader.read({&item, 1}); !done) {
            return done.failure();
        }
        tokens = tokens.subspan(item.tokens.size());
    }
    return nothing{};
}

}  // namespace evaluate
