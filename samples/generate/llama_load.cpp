// From a GGUF file to a llama_model. Every size is checked against the shapes of the tensors, and
// every tensor of the file must be one that the forward pass uses: a file with a bias or an expert
// that would be ignored is refused, since its text would be subtly wrong.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "llama.hpp"

namespace generate {

namespace {

class tensor_reader {
  public:
    explicit tensor_reader(const gguf_file& file) : file_(file) {}

    // Reads a tensor of shape [outputs, inputs] into a matrix, from output `first` on. The matrix
    // gets room for `total` outputs with its first tensor.
    outcome<nothing> read_matrix(matrix& target, const std::string& name, std::size_t total,
                                 std::size_t first, std::size_t outputs, std::size_t inputs) {
        const auto found = find(name, outputs, inputs);
        if (!found) {
            return found.failure();
        }
        const gguf_tensor& tensor = **found;
        target.outputs = total;
        target.inputs = inputs;
        target.weights.resize(total * inputs);
        // A few rows at a time, so that what lies side by side in the result is written together.
        constexpr std::size_t group = 16;
        std::vector<float> rows(group * inputs);
        const std::size_t row_bytes = tensor.bytes.size() / outputs;
        for (std::size_t row = 0; row < outputs; row += group) {
            const std::size_t count = std::min(group, outputs - row);
            auto done = dequantize(tensor.layout->type,
                                   tensor.bytes.subspan(row * row_bytes, count * row_bytes),
                                   std::span(rows).first(count * inputs));
            if (!done) {
                return done;
            }
            for (std::size_t i = 0; i < inputs; ++i) {
                float* out = &target.weights[i * total + first + row];
                for (std::size_t k = 0; k < count; ++k) {
                    out[k] = rows[k * inputs + i];
                }
            }
        }
        return nothing{};
    }

    outcome<nothing> read_vector(std::vector<float>& target, const std::string& name,
                                 std::size_t size) {
        const auto found = find(name, 1, size);
        if (!found) {
            return found.failure();
        }
        target.resize(size);
        return dequantize((*found)->layout->type, (*found)->bytes, target);
    }

    bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

    outcome<nothing> check_all_used() const {
        for (const auto& [name, tensor] : file_.tensors()) {
            if (used_.count(name) == 0) {
                return error{
                    fmt::format("the file has a tensor '{}' that this engine has no use "
                                "for: the model is not a plain Llama",
                                name)};
            }
        }
        return nothing{};
    }

  private:
    // The tensor of that name and shape, or why not. Remembers that it was asked for.
    outcome<const gguf_tensor*> find(const std::string& name, std::size_t rows,
                                     std::size_t columns) {
        const gguf_tensor* tensor = file_.find_tensor(name);
        if (tensor == nullptr) {
            return error{fmt::format("tensor '{}' is missing", name)};
        }
        used_.insert(name);
        const std::uint64_t found_rows = tensor->shape.size() > 1 ? tensor->shape[1] : 1;
        if (tensor->shape.size() > 2 || tensor->shape[0] != columns || found_rows != rows) {
            return error{fmt::format("tensor '{}' is not of shape [{}, {}]", name, rows, columns)};
        }
        return tensor;
    }

    const gguf_file& file_;
    std::set<std::string> used_;
};

// Reads one size of the configuration.
outcome<nothing> read_size(const gguf_file& file, const char* key, std::int64_t most,
                           std::uint32_t& target,
                           std::optional<std::int64_t> fallback = std::nullopt) {
    const auto value = file.integer(key, 1, most, fallback);
    if (!value) {
        return value.failure();
    }
    target = static_cast<std::uint32_t>(*value);
    return nothing{};
}

outcome<nothing> read_sizes(const gguf_file& file, llama_config& config) {
    const auto architecture = file.text("general.architecture");
    if (!architecture) {
        return architecture.failure();
    }
    if (*architecture != "llama") {
        return error{
            fmt::format("the architecture is '{}', this engine runs 'llama' only", *architecture)};
    }
    struct wanted_size {
        const char* key;
        std::int64_t most;
        std::uint32_t* target;
    };
    const wanted_size wanted[] = {
        {"llama.block_count", 1024, &config.layers},
        {"llama.embedding_length", 1 << 16, &config.embedding},
        {"llama.attention.head_count", 1024, &config.query_heads},
        {"llama.feed_forward_length", 1 << 18, &config.feed_forward},
        {"llama.context_length", 1 << 24, &config.context},
    };
    for (const wanted_size& size : wanted) {
        if (auto read = read_size(file, size.key, size.most, *size.target); !read) {
            return read;
        }
    }
    if (auto read = read_size(file, "llama.attention.head_count_kv", 1024, config.kv_heads,
                              config.query_heads);
        !read) {
        return read;
    }
    if (config.query_heads % config.kv_heads != 0) {
        return error{fmt::format("{} query heads do not share {} key-value heads evenly",
                                 config.query_heads, config.kv_heads)};
    }
    if (auto read = read_size(file, "llama.attention.key_length", 1024, config.head_dim,
                              config.embedding / config.query_heads);
        !read) {
        return read;
    }
    const auto value_dim = file.integer("llama.attention.value_length", 1, 1024, config.head_dim);
    if (!value_dim || static_cast<std::uint32_t>(*value_dim) != config.head_dim) {
        return error{"keys and values of different sizes are not supported by this engine"};
    }
    const auto experts = file.integer("llama.expert_count", 0, 1 << 16, 0);
    if (!experts || *experts != 0) {
        return error{"mixtures of experts are not supported by this engine"};
    }
    const auto epsilon = file.number("llama.attention.layer_norm_rms_epsilon");
    if (!epsilon || *epsilon <= 0 || *epsilon > 1) {
        return error{"llama.attention.layer_norm_rms_epsilon is missing or not in (0, 1]"};
    }
    config.norm_epsilon = static_cast<float>(*epsilon);
    return nothing{};
}

outcome<nothing> read_rotation(const gguf_file& file, tensor_reader& tensors,
                               llama_config& config) {
    const auto dimensions = file.integer("llama.rope.dimension_count", 2, config.head_dim,
                                         static_cast<std::int64_t>(config.head_dim));
    if (!dimensions || *dimensions % 2 != 0) {
        return error{fmt::format("llama.rope.dimension_count is not an even number from 2 to {}",
                                 config.head_dim)};
    }
    const auto base = file.number("llama.rope.freq_base", 10000.0);
    if (!base || *base < 1) {
        return error{"llama.rope.freq_base is not a number of at least 1"};
    }
    const auto scaling = file.text("llama.rope.scaling.type", "none");
    const auto factor = file.number("llama.rope.scaling.factor", 1.0);
    if (!scaling || !factor || *factor < 1 || (*scaling != "none" && *scaling != "linear")) {
        return error{
            "the rotation is scaled in a way that this engine does not know: only a "
            "linear factor of at least 1 is supported"};
    }
    const auto pairs = static_cast<std::size_t>(*dimensions / 2);
    std::vector<float> divisors(pairs, 1.0f);
    if (tensors.has("rope_freqs.weight")) {
        if (auto read = tensors.read_vector(divisors, "rope_freqs.weight", pairs); !read) {
            return read;
        }
    }
    const double linear = *scaling == "linear" ? *factor : 1.0;
    for (std::size_t i = 0; i < pairs; ++i) {
        const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(*dimensions);
        const double frequency =
            std::pow(*base, exponent) / (linear * static_cast<double>(divisors[i]));
        if (!std::isfinite(frequency)) {
            return error{"rope_freqs.weight holds a zero or a value that is not finite"};
        }
        config.inverse_frequencies.push_back(frequency);
    }
    return nothing{};
}

outcome<nothing> read_layer(tensor_reader& tensors, const llama_config& config, std::uint32_t index,
                            llama_layer& layer) {
    const std::size_t query = config.query_size();
    const std::size_t kv = config.kv_size();
    const std::size_t inner = config.feed_forward;
    const std::size_t width = config.embedding;
    struct wanted_matrix {
        matrix* target;
        const char* name;
        std::size_t total;
        std::size_t first;
        std::size_t outputs;
        std::size_t inputs;
    };
    const wanted_matrix wanted[] = {
        {&layer.query_key_value, "attn_q", query + 2 * kv, 0, query, width},
        {&layer.query_key_value, "attn_k", query + 2 * kv, query, kv, width},
        {&layer.query_key_value, "attn_v", query + 2 * kv, query + kv, kv, width},
        {&layer.attention_output, "attn_output", width, 0, width, query},
        {&layer.gate_up, "ffn_gate", 2 * inner, 0, inner, width},
        {&layer.gate_up, "ffn_up", 2 * inner, inner, inner, width},
        {&layer.down, "ffn_down", width, 0, width, inner},
    };
    const auto name_of = [&](const char* part) {
        return fmt::format("blk.{}.{}.weight", index, part);
    };
    for (const wanted_matrix& item : wanted) {
        auto read = tensors.read_matrix(*item.target, name_of(item.name), item.total, item.first,
                                        item.outputs, item.inputs);
        if (!read) {
            return read;
        }
    }
    if (auto read =
            tensors.read_vector(layer.attention_norm, name_of("attn_norm"), config.embedding);
        !read) {
        return read;
    }
    return tensors.read_vector(layer.feed_forward_norm, name_of("ffn_norm"), config.embedding);
}

}  // namespace

outcome<llama_model> llama_model::load(const gguf_file& file) {
    llama_model model;
    llama_config& config = model.config;
    tensor_reader tensors(file);
    if (auto read = read_sizes(file, config); !read) {
        return read.failure();
    }
    if (auto read = read_rotation(file, tensors, config); !read) {
        return read.failure();
    }
    const gguf_tensor* embedding = file.find_tensor("token_embd.weight");
    if (embedding == nullptr || embedding->shape.size() != 2 || embedding->shape[1] > (1u << 21)) {
        return error{
            "tensor 'token_embd.weight' is missing or not a matrix of at most 2097152 "
            "rows"};
    }
    config.vocabulary = static_cast<std::uint32_t>(embedding->shape[1]);
    if (auto read = tensors.read_matrix(model.embedding, "token_embd.weight", config.vocabulary, 0,
                                        config.vocabulary, config.embedding);
        !read) {
        return read.failure();
    }
    if (tensors.has("output.weight")) {
        if (auto read = tensors.read_matrix(model.output_matrix, "output.weight", config.vocabulary,
                                            0, config.vocabulary, config.embedding);
            !read) {
            return read.failure();
        }
    }
    if (auto read = tensors.read_vector(model.output_norm, "output_norm.weight", config.embedding);
        !read) {
        return read.failure();
    }
    for (std::uint32_t i = 0; i < config.layers; ++i) {
        if (auto read = read_layer(tensors, config, i, model.layers.emplace_back()); !read) {
            return read.failure();
        }
    }
    if (auto checked = tensors.check_all_used(); !checked) {
        return checked.failure();
    }
    return model;
}

}  // namespace generate
