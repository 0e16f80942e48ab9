#include "recorder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trace/half.hpp"

namespace generate {

namespace {

// A turn of at most so many rows keeps the outputs of all of them, a longer one of its last row.
constexpr std::size_t most_rows_with_outputs = 8;

kv_tensor dense_tensor(void* data, std::uint32_t dtype, std::size_t rows, std::uint32_t heads,
                       std::uint32_t dim) {
    kv_tensor tensor = KV_INIT(kv_tensor);
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rows = rows;
    tensor.heads = heads;
    tensor.dim = dim;
    return tensor;
}

}  // namespace

outcome<std::unique_ptr<trace_recorder>> trace_recorder::open(const std::string& path) {
    try {
        return std::unique_ptr<trace_recorder>(new trace_recorder(path));
    } catch (const trace::error& failure) {
        return error{failure.what()};
    }
}

outcome<nothing> trace_recorder::describe_model(const llama_config& config,
                                                std::span<const std::uint32_t> layers) {
    content_.query_heads = config.query_heads;
    content_.kv_heads = config.kv_heads;
    content_.head_dim = config.head_dim;
    content_.rope_style = config.inverse_frequencies.empty() ? KV_ROPE_NONE : KV_ROPE_INTERLEAVED;
    content_.inverse_frequencies = config.inverse_frequencies;
    content_.layer_numbers.assign(layers.begin(), layers.end());
    if (layers.empty()) {
        content_.layer_numbers = {config.layers / 4, 3 * config.layers / 4};
        const auto last = std::unique(content_.layer_numbers.begin(), content_.layer_numbers.end());
        content_.layer_numbers.erase(last, content_.layer_numbers.end());
    }
    if (content_.layer_numbers.back() >= config.layers) {
        return error{fmt::format("--record-layers names layer {}, the model has 0 to {}",
                                 content_.layer_numbers.back(), config.layers - 1)};
    }
    return nothing{};
}

void trace_recorder::begin_request(kv_cache& cache, const kv_policy& policy, std::uint32_t format) {
    cache_ = &cache;
    content_.format = format;
    if (policy.scorer != KV_SCORER_NONE) {
        content_.scorer = policy.scorer;
        content_.selection = policy.selection;
        content_.policy_flags = policy.flags;
        content_.budget = policy.budget;
        content_.every = policy.every;
        content_.sinks = policy.sinks;
        content_.recent = policy.recent;
        content_.offset_max = policy.offset_max;
        content_.seed = policy.seed;
    }
    content_.requests.emplace_back().prompt_tokens = policy.prompt_tokens;
}

void trace_recorder::begin_turn(std::span<const token_id> tokens) {
    trace::turn& turn = content_.requests.back().turns.emplace_back();
    turn.token_ids.assign(tokens.begin(), tokens.end());
    turn.output_rows =
        tokens.size() <= most_rows_with_outputs ? static_cast<std::uint32_t>(tokens.size()) : 1;
}

outcome<nothing> trace_recorder::attend(std::uint32_t layer, const attention_rows& rows) {
    if (!std::binary_search(content_.layer_numbers.begin(), content_.layer_numbers.end(), layer)) {
        return cache_->attend(layer, rows);
    }
    trace::turn& turn = content_.requests.back().turns.back();
    trace::layer_rows& kept = turn.layers.emplace_back();
    struct part {
        const float* first;
        std::size_t row_size;
        std::vector<std::uint16_t>& target;
    };
    for (const part& one : {part{rows.queries, content_.query_size(), kept.queries},
                            part{rows.keys, content_.kv_size(), kept.keys},
                            part{rows.values, content_.kv_size(), kept.values}}) {
        auto halves = rounded(one.first, rows, one.row_size, layer);
        if (!halves) {
            return halves.failure();
        }
        one.target = std::move(*halves);
    }
    const auto tensor = [&](void* data, std::uint32_t dtype, std::uint32_t heads) {
        return dense_tensor(data, dtype, rows.rows, heads, content_.head_dim);
    };
    auto done = cache_->attend(
        layer, attention_tensors{tensor(kept.queries.data(), KV_DTYPE_F16, content_.query_heads),
                                 tensor(kept.keys.data(), KV_DTYPE_F16, content_.kv_heads),
                                 tensor(kept.values.data(), KV_DTYPE_F16, content_.kv_heads),
                                 tensor(rows.out, KV_DTYPE_F32, content_.query_heads)});
    if (!done) {
        return done;
    }
    const float* end = rows.out + rows.rows * content_.query_size();
    kept.outputs.assign(end - turn.output_rows * content_.query_size(), end);
    return nothing{};
}

// The rows that begin at `first`, dense, as f16.
outcome<std::vector<std::uint16_t>> trace_recorder::rounded(const float* first,
                                                            const attention_rows& rows,
                                                            std::size_t row_size,
                                                            std::uint32_t layer) const {
    std::vector<std::uint16_t> halves;
    halves.reserve(rows.rows * row_size);
    for (std::size_t row = 0; row < rows.rows; ++row) {
        for (const float value : std::span(first + row * rows.row_stride, row_size)) {
            if (!(std::fabs(value) <= 65504.0f)) {
                return error{
                    fmt::format("layer {} hands over {}, which f16 does not hold: leave "
                                "the layer out of --record-layers",
                                layer, value)};
            }
            halves.push_back(trace::half_from_float(value));
        }
    }
    return halves;
}

void trace_recorder::end_turn(std::size_t accepted) {
    content_.requests.back().turns.back().accepted = static_cast<std::uint32_t>(accepted);
}

outcome<nothing> trace_recorder::end_request(kv_seq sequence) {
    trace::request& request = content_.requests.back();
    const auto info = cache_->info(sequence);
    if (!info) {
        return info.failure();
    }
    request.seen = static_cast<std::uint32_t>(info->accepted);
    request.rounds = info->compactions;
    for (const std::uint32_t layer : content_.layer_numbers) {
        const auto retained = cache_->retained(sequence, layer);
        if (!retained) {
            return retained.failure();
        }
        request.retained.push_back(static_cast<std::uint32_t>(*retained));
    }
    return nothing{};
}

outcome<nothing> trace_recorder::save() {
    try {
        file_.commit(trace::encode(content_));
    } catch (const trace::error& failure) {
        return error{failure.what()};
    }
    return nothing{};
}

}  // namespace generate
