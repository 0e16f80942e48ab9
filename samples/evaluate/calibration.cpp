#include "evaluate/calibration.hpp"

#include <algorithm>
#include <utility>

namespace evaluate {

using generate::kv_cache;

bool needs_key_channels(std::span<const configuration> configurations) {
    return std::any_of(configurations.begin(), configurations.end(), [](const configuration& one) {
        return generate::takes_key_channels(one.storage.keys);
    });
}

namespace {

// A text in the f16 cache.
struct text_read {
    kv_cache cache;
    kv_seq sequence;
};

outcome<text_read> read_through(const generate::llama_model& model,
                                std::span<const generate::token_id> tokens, std::uint32_t chunk,
                                std::uint32_t threads) {
    generate::cache_options room;
    room.most_tokens = static_cast<std::uint32_t>(tokens.size());
    room.most_step_rows = chunk;
    room.threads = threads;
    auto cache = kv_cache::create(model.config, room);
    if (!cache) {
        return cache.failure();
    }
    const auto sequence = cache->create_sequence(nullptr, KV_SEQ_GATHER_STATISTICS);
    if (!sequence) {
        return sequence.failure();
    }
    generate::set_matrix_threads(static_cast<int>(threads));
    generate::forward_pass pass(model, chunk);
    while (!tokens.empty()) {
        const kv_cache::item item = {*sequence,
                                     tokens.first(std::min<std::size_t>(chunk, tokens.size()))};
        const auto positions = cache->begin({&item, 1});
        if (!positions) {
            return positions.failure();
        }
        if (auto done = pass.run({item.tokens, *positions, {}}, *cache, {}); !done) {
            return done.failure();
        }
        if (auto ended = cache->end(); !ended) {
            return ended.failure();
        }
        tokens = tokens.subspan(item.tokens.size());
    }
    return text_read{std::move(*cache), *sequence};
}

}  // namespace

outcome<std::vector<channel_constants>> measure_key_channels(
    const generate::llama_model& model, std::span<const generate::token_id> tokens,
    std::uint32_t chunk, std::uint32_t threads) {
    const auto read = read_through(model, tokens, chunk, threads);
    if (!read) {
        return read.failure();
    }
    std::vector<channel_constants> measured;
    for (std::uint32_t layer = 0; layer < model.config.layers; ++layer) {
        auto one = (*read).cache.fit_keys((*read).sequence, layer);
        if (!one) {
            return one.failure();
        }
        measured.push_back(std::move(*one));
    }
    return measured;
}

outcome<std::vector<generate::query_statistics>> measure_queries(
    const generate::llama_model& model, std::span<const generate::token_id> tokens,
    std::uint32_t chunk, std::uint32_t threads) {
    const auto read = read_through(model, tokens, chunk, threads);
    if (!read) {
        return read.failure();
    }
    std::vector<generate::query_statistics> measured;
    for (std::uint32_t layer = 0; layer < model.config.layers; ++layer) {
        auto one = (*read).cache.gathered((*read).sequence, layer);
        if (!one) {
            return one.failure();
        }
        measured.push_back(std::move(*one));
    }
    return measured;
}

}  // namespace evaluate
