#include "kv_cache.hpp"

#include <fmt/format.h>
#include <kvrt/kv_cuda.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace generate {

namespace {

// The library's status and its one-line message.
error library_error(const char* call, kv_status status) {
    char message[512];
    kv_last_error(message, sizeof(message));
    return error{fmt::format("{}: {}: {}", call, kv_status_name(status), message)};
}

kv_tensor tensor_of(float* data, std::size_t rows, std::size_t heads, std::size_t dim,
                    std::size_t row_stride) {
    kv_tensor tensor = KV_INIT(kv_tensor);
    tensor.data = data;
    tensor.dtype = KV_DTYPE_F32;
    tensor.rows = rows;
    tensor.heads = heads;
    tensor.dim = dim;
    tensor.row_stride = static_cast<std::int64_t>(row_stride);
    tensor.head_stride = static_cast<std::int64_t>(dim);
    tensor.dim_stride = 1;
    return tensor;
}

// More waits for a GPU's uploads than a step can need.
constexpr int most_uploads = 64;

// Formats that code the tokens of a block together want 64 of them.
bool codes_blocks(std::uint32_t format) {
    return format >= KV_FORMAT_KIVI4 && format <= KV_FORMAT_KVARN2;
}

// Fills `room` and returns it, or NULL where a format says all there is to say.
const kv_storage* storage_of(const operand_storage& choice, kv_storage& room) {
    room.flags = choice.flags;
    return choice.flags == 0 ? nullptr : &room;
}

// The same for keys, with what was measured of their channels.
const kv_storage* storage_of_keys(const operand_storage& choice, const llama_config& config,
                                  const channel_constants& channels, kv_storage& room) {
    room.channel_means = channels.means.data();
    room.channel_scales = channels.scales.data();
    room.channel_heads = config.kv_heads;
    room.channel_dim = config.head_dim;
    room.flags = choice.flags;
    return &room;
}

}  // namespace

outcome<kv_cache> kv_cache::create(const llama_config& config, const cache_options& options) {
    kv_rope rope = KV_INIT(kv_rope);
    rope.style = KV_ROPE_INTERLEAVED;
    rope.dimensions = static_cast<std::uint32_t>(2 * config.inverse_frequencies.size());
    rope.inverse_frequencies = config.inverse_frequencies.data();

    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = config.query_heads;
    layer.kv_heads = config.kv_heads;
    layer.key_dim = config.head_dim;
    layer.rope = &rope;
    layer.flags = options.lane_per_head ? KV_LAYER_LANE_PER_HEAD : 0;
    if (options.cache_positions) {
        layer.flags |= KV_LAYER_CACHE_POSITIONS;
    }
    const std::size_t choices = options.storage.size();
    if (choices != 1 && choices != config.layers) {
        return error{fmt::format("storage is given for {} layers, the model has {}", choices,
                                 config.layers)};
    }
    const std::size_t channels = options.key_channels.size();
    if (channels != 0 && channels != config.layers) {
        return error{fmt::format("channels are given for {} layers, the model has {}", channels,
                                 config.layers)};
    }
    kv_storage rotated = KV_INIT(kv_storage);
    rotated.flags = KV_STORAGE_ROTATE;
    if (options.demoted_format != 0) {
        layer.demoted_key_format = options.demoted_format;
        layer.demote_after = options.demote_after;
        layer.demoted_key_storage = layer.demoted_value_storage = &rotated;
    }
    std::vector<kv_layer> layers(config.layers, layer);
    std::vector<kv_storage> storages(2 * std::size_t{config.layers}, KV_INIT(kv_storage));
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const layer_storage& choice = options.storage[choices == 1 ? 0 : i];
        layers[i].key_format = choice.keys.format;
        layers[i].value_format = choice.values.format;
        layers[i].key_storage =
            channels != 0 && takes_key_channels(choice.keys)
                ? storage_of_keys(choice.keys, config, options.key_channels[i], storages[2 * i])
                : storage_of(choice.keys, storages[2 * i]);
        layers[i].value_storage = storage_of(choice.values, storages[2 * i + 1]);
    }

    if (options.preset != 0) {
        const kv_status status =
            kv_model_apply_preset(layers.data(), config.layers, options.preset);
        if (status != KV_OK) {
            return library_error("kv_model_apply_preset", status);
        }
    }

    kv_model model = KV_INIT(kv_model);
    model.layers = layers.data();
    model.layer_count = config.layers;

    kv_pool_config pool_config = KV_INIT(kv_pool_config);
    pool_config.flags = KV_POOL_ELASTIC;
    if (std::any_of(layers.begin(), layers.end(), [](const kv_layer& one) {
            return codes_blocks(one.key_format) || codes_blocks(one.value_format);
        })) {
        pool_config.block_tokens = 64;
    }
    pool_config.max_sequences = options.most_sequences;
    pool_config.max_tokens_per_sequence = options.most_tokens;
    pool_config.max_step_tokens = options.most_step_rows;
    pool_config.threads = options.threads;
    pool_config.max_observed_sequences = options.most_observed;
    kv_cache cache;
    if (options.on_gpu) {
        pool_config.device = KV_DEVICE_CUDA;
        if (auto opened = cache.create_gpu_rows(config, options.most_step_rows); !opened) {
            return opened.failure();
        }
    }

    // Without an arena the plan says how large a one these limits need.
    kv_plan_report plan = KV_INIT(kv_plan_report);
    if (const kv_status status = kv_plan(&pool_config, &model, &plan); status != KV_OK) {
        return library_error("kv_plan", status);
    }
    pool_config.arena_bytes = plan.arena_bytes_needed;

    kv_pool* pool = nullptr;
    if (const kv_status status = kv_pool_create(&pool_config, &model, &pool); status != KV_OK) {
        return library_error("kv_pool_create", status);
    }
    cache.pool_.reset(pool);
    cache.positions_.reserve(options.most_step_rows);
    cache.query_heads_ = config.query_heads;
    cache.kv_heads_ = config.kv_heads;
    cache.head_dim_ = config.head_dim;
    const auto pairs = static_cast<std::uint32_t>(config.inverse_frequencies.size());
    cache.bands_ = pairs + (config.head_dim - 2 * pairs);
    cache.bytes_per_token_ = plan.full_bytes_per_token;
    cache.rotates_ = options.cache_positions;
    return cache;
}

outcome<nothing> kv_cache::create_gpu_rows(const llama_config& config, std::size_t most_rows) {
    auto opened = cuda_device::open();
    if (!opened) {
        return opened.failure();
    }
    gpu_ = std::move(*opened);
    const std::size_t queries = config.query_size();
    auto packed = device_rows::allocate(*gpu_, most_rows * (queries + 2 * config.kv_size()));
    if (!packed) {
        return packed.failure();
    }
    gpu_packed_.emplace(std::move(*packed));
    auto out = device_rows::allocate(*gpu_, most_rows * queries);
    if (!out) {
        return out.failure();
    }
    gpu_out_.emplace(std::move(*out));
    return nothing{};
}

kv_cache::kv_cache(kv_cache&& other) noexcept
    : attention_cache(other),
      gpu_(std::move(other.gpu_)),
      gpu_packed_(std::move(other.gpu_packed_)),
      gpu_out_(std::move(other.gpu_out_)),
      pool_(std::move(other.pool_)),
      step_(std::exchange(other.step_, nullptr)),
      positions_(std::move(other.positions_)),
      query_heads_(other.query_heads_),
      kv_heads_(other.kv_heads_),
      head_dim_(other.head_dim_),
      bands_(other.bands_),
      bytes_per_token_(other.bytes_per_token_),
      rotates_(other.rotates_) {}

kv_cache::~kv_cache() { cancel(); }

void kv_cache::cancel() {
    // Cancelling cannot fail for an open step, and NULL is ignored.
    static_cast<void>(kv_step_cancel(std::exchange(step_, nullptr)) == KV_OK);
}

outcome<kv_seq> kv_cache::create_sequence(const kv_policy* policy, std::uint32_t flags) {
    kv_seq_config config = KV_INIT(kv_seq_config);
    config.flags = flags;
    config.policy = policy;
    kv_seq sequence = 0;
    const kv_status status = kv_seq_create(pool_.get(), &config, &sequence);
    if (status != KV_OK) {
        return library_error("kv_seq_create", status);
    }
    return sequence;
}

outcome<nothing> kv_cache::release_sequence(kv_seq sequence) {
    if (const kv_status status = kv_seq_release(pool_.get(), sequence); status != KV_OK) {
        return library_error("kv_seq_release", status);
    }
    return nothing{};
}

outcome<std::vector<kv_seq>> kv_cache::fork(kv_seq parent, std::size_t count) {
    std::vector<kv_seq> children(count);
    const kv_status status =
        kv_seq_fork(pool_.get(), parent, static_cast<std::uint32_t>(count), children.data());
    if (status != KV_OK) {
        return library_error("kv_seq_fork", status);
    }
    return children;
}

outcome<nothing> kv_cache::set_policy(kv_seq sequence, const kv_policy& policy) {
    const kv_status status = kv_seq_set_policy(pool_.get(), sequence, &policy);
    if (status != KV_OK) {
        return library_error("kv_seq_set_policy", status);
    }
    return nothing{};
}

outcome<kv_compress_report> kv_cache::compress(kv_seq sequence) {
    kv_compress_report report = KV_INIT(kv_compress_report);
    const kv_status status = kv_compress(pool_.get(), sequence, nullptr, &report);
    if (status != KV_OK) {
        return library_error("kv_compress", status);
    }
    return report;
}

outcome<std::span<const std::uint32_t>> kv_cache::begin(std::span<const item> items) {
    cancel();
    if (const kv_status status = kv_step_begin(pool_.get(), &step_); status != KV_OK) {
        return library_error("kv_step_begin", status);
    }
    if (gpu_ != nullptr) {
        const kv_status status = kv_cuda_step_use_stream(step_, gpu_->stream());
        if (status != KV_OK) {
            return library_error("kv_cuda_step_use_stream", status);
        }
    }
    positions_.clear();
    for (const item& one : items) {
        kv_append_info info = KV_INIT(kv_append_info);
        const auto count = static_cast<std::uint32_t>(one.tokens.size());
        const kv_status status =
            kv_seq_append(step_, one.sequence, one.tokens.data(), count, &info);
        if (status != KV_OK) {
            return library_error("kv_seq_append", status);
        }
        for (std::uint32_t i = 0; i < count; ++i) {
            positions_.push_back(static_cast<std::uint32_t>(info.first_position + i));
        }
    }
    if (auto reserved = reserve(); !reserved) {
        return reserved.failure();
    }
    return std::span<const std::uint32_t>(positions_);
}

outcome<nothing> kv_cache::reserve() {
    kv_reserve_report report = KV_INIT(kv_reserve_report);
    kv_status status = kv_step_reserve(step_, &report);
    // Tables go to a GPU in pieces, as it takes them; the next call goes on from there.
    for (int i = 0; status == KV_AGAIN && gpu_ != nullptr && i < most_uploads; ++i) {
        if (auto waited = gpu_->wait(); !waited) {
            return waited;
        }
        status = kv_step_reserve(step_, &report);
    }
    if (status != KV_OK) {
        return library_error("kv_step_reserve", status);
    }
    return nothing{};
}

// The model's products are the CPU's, so each layer's rows cross the bus, there and back.
outcome<nothing> kv_cache::attend_on_gpu(std::uint32_t layer, const attention_rows& rows) {
    const std::size_t queries = std::size_t{query_heads_} * head_dim_;
    const std::size_t packed = rows.rows * rows.row_stride;
    std::memcpy(gpu_packed_->host(), rows.queries, packed * sizeof(float));
    if (auto sent = gpu_packed_->upload(packed); !sent) {
        return sent;
    }
    const auto at = [&](const float* place, std::size_t heads) {
        return tensor_of(gpu_packed_->device() + (place - rows.queries), rows.rows, heads,
                         head_dim_, rows.row_stride);
    };
    auto done =
        attend(layer, {at(rows.queries, query_heads_), at(rows.keys, kv_heads_),
                       at(rows.values, kv_heads_),
                       tensor_of(gpu_out_->device(), rows.rows, query_heads_, head_dim_, queries)});
    if (done) {
        done = gpu_out_->download(rows.rows * queries);
    }
    if (done) {
        done = gpu_->wait();
    }
    if (done) {
        std::memcpy(rows.out, gpu_out_->host(), rows.rows * queries * sizeof(float));
    }
    return done;
}

outcome<nothing> kv_cache::attend(std::uint32_t layer, const attention_rows& rows) {
    if (gpu_ != nullptr) {
        return attend_on_gpu(layer, rows);
    }
    const auto packed = [&](float* data, std::size_t heads) {
        return tensor_of(data, rows.rows, heads, head_dim_, rows.row_stride);
    };
    return attend(layer, {packed(rows.queries, query_heads_), packed(rows.keys, kv_heads_),
                          packed(rows.values, kv_heads_),
                          tensor_of(rows.out, rows.rows, query_heads_, head_dim_,
                                    std::size_t{query_heads_} * head_dim_)});
}

outcome<nothing> kv_cache::attend(std::uint32_t layer, const attention_tensors& tensors) {
    if (const kv_status status = kv_write(step_, layer, &tensors.keys, &tensors.values);
        status != KV_OK) {
        return library_error("kv_write", status);
    }
    if (const kv_status status = kv_attend(step_, layer, &tensors.queries, &tensors.out, nullptr);
        status != KV_OK) {
        return library_error("kv_attend", status);
    }
    return nothing{};
}

outcome<nothing> kv_cache::accept(kv_seq sequence, std::size_t count) {
    const kv_status status = kv_step_accept(step_, sequence, static_cast<std::uint32_t>(count));
    if (status != KV_OK) {
        return library_error("kv_step_accept", status);
    }
    return nothing{};
}

outcome<kv_step_report> kv_cache::end() {
    kv_step_report report = KV_INIT(kv_step_report);
    // The step is gone afterwards, whatever the status says.
    const kv_status status = kv_step_end(std::exchange(step_, nullptr), &report);
    if (status != KV_OK) {
        return library_error("kv_step_end", status);
    }
    return report;
}

outcome<kv_pool_stats> kv_cache::statistics() const {
    kv_pool_stats stats = KV_INIT(kv_pool_stats);
    if (const kv_status status = kv_pool_get_stats(pool_.get(), &stats); status != KV_OK) {
        return library_error("kv_pool_get_stats", status);
    }
    return stats;
}

outcome<kv_seq_info> kv_cache::info(kv_seq sequence) const {
    kv_seq_info info = KV_INIT(kv_seq_info);
    if (const kv_status status = kv_seq_get_info(pool_.get(), sequence, &info); status != KV_OK) {
        return library_error("kv_seq_get_info", status);
    }
    return info;
}

outcome<channel_constants> kv_cache::fit_keys(kv_seq sequence, std::uint32_t layer) const {
    const std::size_t size = std::size_t{kv_heads_} * head_dim_;
    channel_constants measured = {std::vector<float>(size), std::vector<float>(size)};
    kv_affine_fit fit = KV_INIT(kv_affine_fit);
    fit.layer = layer;
    fit.kv_heads = kv_heads_;
    fit.key_dim = head_dim_;
    fit.channel_means = measured.means.data();
    fit.channel_scales = measured.scales.data();
    const kv_status status = kv_seq_fit_affine(pool_.get(), sequence, &fit);
    if (status != KV_OK) {
        return library_error("kv_seq_fit_affine", status);
    }
    return measured;
}

outcome<std::uint64_t> kv_cache::retained(kv_seq sequence, std::uint32_t layer) const {
    kv_seq_layer_info info = KV_INIT(kv_seq_layer_info);
    const kv_status status = kv_seq_get_layer_info(pool_.get(), sequence, layer, &info);
    if (status != KV_OK) {
        return library_error("kv_seq_get_layer_info", status);
    }
    return info.retained;
}

namespace {

kv_query_statistics view_of(query_statistics& statistics, std::uint32_t layer,
                            std::uint32_t query_heads, std::uint32_t bands) {
    kv_query_statistics view = KV_INIT(kv_query_statistics);
    view.layer = layer;
    view.query_heads = query_heads;
    view.bands = bands;
    view.tokens = statistics.tokens;
    view.mean_real = statistics.mean_real.data();
    view.mean_imaginary = statistics.mean_imaginary.data();
    view.mean_magnitude = statistics.mean_magnitude.data();
    return view;
}

}  // namespace

outcome<query_statistics> kv_cache::gathered(kv_seq sequence, std::uint32_t layer) const {
    const std::size_t size = std::size_t{query_heads_} * bands_;
    query_statistics statistics = {0, std::vector<float>(size), std::vector<float>(size),
                                   std::vector<float>(size)};
    kv_query_statistics view = view_of(statistics, layer, query_heads_, bands_);
    const kv_status status = kv_seq_get_statistics(pool_.get(), sequence, &view);
    if (status != KV_OK) {
        return library_error("kv_seq_get_statistics", status);
    }
    statistics.tokens = view.tokens;
    return statistics;
}

outcome<nothing> kv_cache::set_statistics(std::uint32_t layer, query_statistics& statistics) {
    const std::size_t size = std::size_t{query_heads_} * bands_;
    if (statistics.mean_real.size() != size || statistics.mean_imaginary.size() != size ||
        statistics.mean_magnitude.size() != size) {
        return error{fmt::format("statistics of {} bands, this cache's layers have {}",
                                 statistics.mean_real.size(), size)};
    }
    const kv_query_statistics view = view_of(statistics, layer, query_heads_, bands_);
    const kv_status status = kv_pool_set_statistics(pool_.get(), &view);
    if (status != KV_OK) {
        return library_error("kv_pool_set_statistics", status);
    }
    return nothing{};
}

}  // namespace generate
