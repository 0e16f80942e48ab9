// A pool on KV_DEVICE_CUDA and one on the CPU, that do the same steps: what is stored must have the
// same bytes, and what attention gives must agree. The device is whatever a twin_device stands for:
// the fake driver with the kernels themselves (twin_pools, below), or a GPU (tests/gpu).
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "api/handles.hpp"
#include "cuda_pool.hpp"
#include "fake_kernels.hpp"
#include "twin_device.hpp"

namespace kvrt::cuda {

/// What twin pools are made for.
struct twin_model {
    std::vector<kv_layer> layers;
    kv_model model = KV_INIT(kv_model);
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t block_tokens = 16;
    uint64_t arena_bytes = uint64_t{16} << 20;
    uint32_t pressure_percent = 0;
    uint32_t max_observed_sequences = 0;

    twin_model() = default;
    twin_model(const twin_model&) = delete;
    twin_model& operator=(const twin_model&) = delete;
    virtual ~twin_model() = default;

    kv_layer& add(uint32_t keys, uint32_t values) {
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = 4;
        layer.kv_heads = 2;
        layer.key_dim = 64;
        layer.key_format = keys;
        layer.value_format = values;
        layers.push_back(layer);
        return layers.back();
    }
    const kv_model& describe() {
        model.layers = layers.data();
        model.layer_count = static_cast<uint32_t>(layers.size());
        return model;
    }
};

/// Layers that a test has described.
struct layers_given : twin_model {
    explicit layers_given(const std::vector<kv_layer>& wanted) { layers = wanted; }
};

/// A layer of each kind that kernels know: storages, windows, biases, sharing, lanes by head.
struct layers_of_all_kinds : twin_model {
    float scales[2] = {0.02f, 0.05f};
    float sinks[6] = {0.5f, -1.0f, 0.25f, 0.0f, 2.0f, -0.5f};
    float slopes[6] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.03f, 0.015f};
    kv_storage static_scales = KV_INIT(kv_storage);
    kv_storage rotated = KV_INIT(kv_storage);
    kv_rope rope = KV_INIT(kv_rope);

    layers_of_all_kinds() {
        static_scales.scales = scales;
        static_scales.scale_count = 2;
        add(KV_FORMAT_F16, KV_FORMAT_F16);
        kv_layer& windowed = add(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN);
        windowed.window = 40;
        windowed.window_sinks = 4;
        windowed.logit_softcap = 3.0f;
        kv_layer& biased = add(KV_FORMAT_INT4_TOKEN, KV_FORMAT_INT4_TOKEN);
        biased.query_heads = 6;
        biased.sink_logits = sinks;
        biased.alibi_slopes = slopes;
        kv_layer& scaled = add(KV_FORMAT_FP8_E4M3, KV_FORMAT_INT8_TOKEN);
        scaled.key_storage = &static_scales;
        kv_layer& shared = add(KV_FORMAT_F16, KV_FORMAT_F16);
        shared.flags = KV_LAYER_SHARED;
        shared.query_heads = 2;
        kv_layer& narrower = add(KV_FORMAT_F16, KV_FORMAT_F16);  // over the same cache
        narrower.flags = KV_LAYER_SHARED;
        narrower.window = 30;
        narrower.window_sinks = 2;
        add(KV_FORMAT_BF16, KV_FORMAT_BF16).flags = KV_LAYER_LANE_PER_HEAD;
        kv_layer& mixed = add(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN);
        mixed.key_dim = 40;
        mixed.value_dim = 56;
        rotated.flags = KV_STORAGE_ROTATE;
        kv_layer& turned = add(KV_FORMAT_Q8_0, KV_FORMAT_INT4_TOKEN);
        turned.key_storage = turned.value_storage = &rotated;
        add(KV_FORMAT_TURBO4, KV_FORMAT_TURBO4);
        rope.dimensions = 48;  // the others are left alone
        kv_layer& by_slots = add(KV_FORMAT_Q4_0, KV_FORMAT_NVFP4);
        by_slots.flags = KV_LAYER_CACHE_POSITIONS;
        by_slots.rope = &rope;
    }
};

/// [rows, heads, dim] of f32 on the host, and the same on the device in `type`.
struct twin_tensor {
    std::vector<float> host;
    device_pointer device = 0;
    kv_tensor on_host = KV_INIT(kv_tensor);
    kv_tensor on_device = KV_INIT(kv_tensor);
};

struct twin_sequence {
    kv_seq of[2] = {0, 0};  ///< on the device, on the CPU
    uint32_t tokens = 0;
};
struct twin_append {
    twin_sequence* sequence = nullptr;
    uint32_t rows = 0;
    uint32_t accepted = 0;
};

class twin_pools_on {
  public:
    const std::unique_ptr<twin_model> made_for;
    twin_model& kinds = *made_for;
    kv_pool* pools[2] = {nullptr, nullptr};  ///< on the device, on the CPU
    std::mt19937 random{7};
    double worst = 0.0;        ///< error, in units of the largest number of an output
    uint64_t differences = 0;  ///< stored rows, outputs beyond the bound

    static std::unique_ptr<twin_model> laid_out_as(uint32_t layout) {
        auto made = std::make_unique<layers_of_all_kinds>();
        made->layout = layout;
        return made;
    }
    /// `device` outlives it. By `plugin` instead of the one that is found, unless it is null.
    twin_pools_on(twin_device& device, uint32_t flags,
                  std::unique_ptr<twin_model> wanted = std::make_unique<layers_of_all_kinds>(),
                  const kvrt_plugin* plugin = nullptr)
        : made_for(std::move(wanted)), device_(device) {
        if (plugin != nullptr) replace_cuda_plugin(plugin);
        for (uint32_t i = 0; i < 2; ++i) {
            kv_pool_config config = small_config(flags);
            config.device = i == 0 ? KV_DEVICE_CUDA : KV_DEVICE_CPU;
            config.arena_bytes = kinds.arena_bytes;
            config.block_tokens = kinds.block_tokens;
            config.pressure_percent = kinds.pressure_percent;
            config.max_observed_sequences = kinds.max_observed_sequences;
            config.layout = kinds.layout;
            const kv_status verdict = kv_pool_create(&config, &kinds.describe(), &pools[i]);
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
    }
    twin_pools_on(twin_device& device, uint32_t flags, uint32_t layout)
        : twin_pools_on(device, flags, laid_out_as(layout)) {}
    twin_pools_on(twin_device& device, uint32_t flags, const std::vector<kv_layer>& layers,
                  const kvrt_plugin* plugin = nullptr)
        : twin_pools_on(device, flags, std::make_unique<layers_given>(layers), plugin) {}
    twin_pools_on(const twin_pools_on&) = delete;
    twin_pools_on& operator=(const twin_pools_on&) = delete;
    ~twin_pools_on() {
        device_.catch_up();
        for (const device_pointer each : memory_) device_.release(each);
        for (kv_pool* pool : pools) kv_pool_release(pool);
    }

    uint32_t layers() const { return kinds.model.layer_count; }
    bool stores(uint32_t layer) const { return (kinds.layers[layer].flags & KV_LAYER_SHARED) == 0; }

    /// Pieces of few allocations, as a host's own allocator has them.
    device_pointer allocate(std::size_t bytes) {
        constexpr std::size_t slab = std::size_t{2} << 20;
        REQUIRE(bytes <= slab);
        if (memory_.empty() || used_ + bytes > slab) {
            memory_.push_back(device_.allocate(slab));
            used_ = 0;
        }
        const device_pointer piece = memory_.back() + used_;
        used_ += (bytes + 511) / 256 * 256;
        return piece;
    }

    twin_tensor make_tensor(uint32_t rows, uint32_t heads, uint32_t dim,
                            uint32_t type = KV_DTYPE_F32) {
        twin_tensor made;
        made.host.resize(std::size_t{rows} * heads * dim);
        made.device = allocate(made.host.size() * sizeof(float));
        for (kv_tensor* view : {&made.on_host, &made.on_device}) {
            view->rows = rows;
            view->heads = heads;
            view->dim = dim;
        }
        made.on_host.dtype = KV_DTYPE_F32;
        made.on_device.dtype = type;
        made.on_host.data = made.host.data();
        made.on_device.data = reinterpret_cast<void*>(made.device);
        return made;
    }
    /// New numbers, that any type holds.
    void draw(twin_tensor& tensor) {
        std::normal_distribution<float> normal;
        for (float& each : tensor.host) {
            each = bf16_to_f32(f32_to_bf16(normal(random)));
            each = f16_to_f32(f32_to_f16(each));
        }
    }
    /// What the device's copy is to hold, for when its stream gets there.
    std::function<void()> upload(const twin_tensor& tensor) {
        const element type = static_cast<element>(tensor.on_device.dtype);
        std::vector<std::byte> bytes(tensor.host.size() * element_bytes(type));
        for (std::size_t i = 0; i < tensor.host.size(); ++i) {
            store_element(bytes.data() + i * element_bytes(type), type, tensor.host[i]);
        }
        return [this, to = tensor.device, bytes = std::move(bytes)] {
            std::byte* const memory = device_.view(to, bytes.size());
            if (memory != nullptr) std::memcpy(memory, bytes.data(), bytes.size());
        };
    }
    /// Compares the device's copy, once its stream gets there, with what the host has now.
    void expect(const twin_tensor& tensor, double bound) {
        device_.enqueue("compare", [this, from = tensor.device, expected = tensor.host, bound] {
            compare(from, expected, bound);
        });
    }

    twin_sequence create(const kv_policy* policy = nullptr) {
        twin_sequence made;
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy;
        for (uint32_t i = 0; i < 2; ++i) {
            REQUIRE(kv_seq_create(pools[i], &config, &made.of[i]) == KV_OK);
        }
        return made;
    }
    twin_sequence fork(const twin_sequence& parent) {
        twin_sequence made = parent;
        for (uint32_t i = 0; i < 2; ++i) {
            REQUIRE(kv_seq_fork(pools[i], parent.of[i], 1, &made.of[i]) == KV_OK);
        }
        return made;
    }
    void truncate(twin_sequence& sequence, uint32_t tokens) {
        for (uint32_t i = 0; i < 2; ++i) {
            REQUIRE(kv_seq_truncate(pools[i], sequence.of[i], tokens) == KV_OK);
        }
        sequence.tokens = tokens;
    }
    void release(const twin_sequence& sequence) {
        for (uint32_t i = 0; i < 2; ++i) {
            REQUIRE(kv_seq_release(pools[i], sequence.of[i]) == KV_OK);
        }
    }

    /// Begins a step on both, up to its reserve. Where the device is behind, it catches up.
    void begin(const std::vector<twin_append>& items, kv_step* (&steps)[2]) {
        for (uint32_t i = 0; i < 2; ++i) {
            REQUIRE(kv_step_begin(pools[i], &steps[i]) == KV_OK);
            if (i == 0) {
                REQUIRE(kv_cuda_step_use_stream(steps[0], as_stream(device_.stream())) == KV_OK);
            }
            for (const twin_append& item : items) {
                REQUIRE(kv_seq_append(steps[i], item.sequence->of[i], nullptr, item.rows,
                                      nullptr) == KV_OK);
            }
            kv_status verdict = kv_step_reserve(steps[i], nullptr);
            while (verdict == KV_AGAIN && i == 0) {
                device_.catch_up();
                verdict = kv_step_reserve(steps[i], nullptr);
            }
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
    }
    void end(const std::vector<twin_append>& items, kv_step* (&steps)[2]) {
        for (uint32_t i = 0; i < 2; ++i) {
            for (const twin_append& item : items) {
                REQUIRE(kv_step_accept(steps[i], item.sequence->of[i], item.accepted) == KV_OK);
            }
            reports[i] = KV_INIT(kv_step_report);
            const kv_status verdict = kv_step_end(steps[i], &reports[i]);
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
        for (const twin_append& item : items) item.sequence->tokens += item.accepted;
    }

    void cancel(kv_step* (&steps)[2]) {
        for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
    }

    /// Keys and values of a layer for all rows of a step.
    void write_layer(kv_step* (&steps)[2], uint32_t l, uint32_t rows) {
        const kv_layer& layer = kinds.layers[l];
        const uint32_t value_dim = layer.value_dim != 0 ? layer.value_dim : layer.key_dim;
        const uint32_t type = KV_DTYPE_F32 + l % 3;
        twin_tensor keys = make_tensor(rows, layer.kv_heads, layer.key_dim, type);
        twin_tensor values = make_tensor(rows, layer.kv_heads, value_dim, type);
        for (twin_tensor* each : {&keys, &values}) {
            draw(*each);
            device_.enqueue("inputs", upload(*each));
        }
        write(steps, l, keys, values);
    }

    /// A whole step: every layer written and, unless it is only a prompt, attended over.
    void step(const std::vector<twin_append>& items, bool only_prompt = false) {
        kv_step* steps[2];
        begin(items, steps);
        run_layers(items, steps, only_prompt);
        end(items, steps);
    }
    void run_layers(const std::vector<twin_append>& items, kv_step* (&steps)[2],
                    bool only_prompt = false) {
        uint32_t rows = 0;
        for (const twin_append& item : items) rows += item.rows;
        for (uint32_t l = 0; l < layers(); ++l) {
            const kv_layer& layer = kinds.layers[l];
            const uint32_t value_dim = layer.value_dim != 0 ? layer.value_dim : layer.key_dim;
            const uint32_t type = KV_DTYPE_F32 + l % 3;
            if (stores(l)) write_layer(steps, l, rows);
            if (only_prompt) continue;
            twin_tensor queries = make_tensor(rows, layer.query_heads, layer.key_dim, type);
            twin_tensor out = make_tensor(rows, layer.query_heads, value_dim);
            twin_tensor log_sums = make_tensor(rows, layer.query_heads, 1);
            draw(queries);
            upload(queries)();
            attend(steps, l, queries, out, log_sums);
            expect(out, bound_of(l));
            expect(log_sums, bound_of(l));
        }
    }

    void write(kv_step* (&steps)[2], uint32_t layer, const twin_tensor& keys,
               const twin_tensor& values) {
        REQUIRE(kv_write(steps[1], layer, &keys.on_host, &values.on_host) == KV_OK);
        const kv_status verdict = kv_write(steps[0], layer, &keys.on_device, &values.on_device);
        REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
    }
    void attend(kv_step* (&steps)[2], uint32_t layer, const twin_tensor& queries,
                const twin_tensor& out, const twin_tensor& log_sums) {
        kv_attend_options options = KV_INIT(kv_attend_options);
        options.log_sum_exp = static_cast<float*>(log_sums.on_host.data);
        REQUIRE(kv_attend(steps[1], layer, &queries.on_host, &out.on_host, &options) == KV_OK);
        options.log_sum_exp = static_cast<float*>(log_sums.on_device.data);
        const kv_status verdict =
            kv_attend(steps[0], layer, &queries.on_device, &out.on_device, &options);
        REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
    }

    /// What is multiplied has 8 bits or 11, here and there, and not the same ones.
    double bound_of(uint32_t layer) const {
        return kinds.layers[layer].key_format == KV_FORMAT_BF16 ? 1.0 / 256 : 1.0 / 512;
    }

    /// Every stored word of the sequence, in all lanes, on both.
    void compare_stored(const twin_sequence& sequence) {
        device_.catch_up();
        cache& here = pools[0]->store;
        cache& there = pools[1]->store;
        const sequence_state_pair found{here.sequences.find(sequence.of[0]),
                                        there.sequences.find(sequence.of[1])};
        REQUIRE(found.device != nullptr);
        REQUIRE(found.cpu != nullptr);
        for (uint32_t l = 0; l < here.model.lanes.size(); ++l) {
            const lane_geometry& lane = here.model.lanes[l];
            const lane_state& mine = found.device->lanes[l];
            const lane_state& theirs = found.cpu->lanes[l];
            REQUIRE(mine.slots == theirs.slots);
            REQUIRE(mine.blocks == theirs.blocks);
            REQUIRE(mine.sealed_blocks == theirs.sealed_blocks);
            REQUIRE(mine.opened_slots == theirs.opened_slots);
            const uint32_t block_tokens = here.model.block_tokens;
            for (uint32_t first = 0; first < theirs.slots; first += block_tokens) {
                const uint32_t block = first / block_tokens;
                const bool sealed = block < theirs.sealed_blocks;
                const tile_layout& layout = sealed ? lane.sealed_layout : lane.layout;
                device_.read(reinterpret_cast<device_pointer>(here.blocks.arena()) +
                                 uint64_t{mine.table[block]} * block_unit,
                             stored_block_, layout.block_bytes);
                compare_block(layout, stored_block_.data(),
                              block_address(there.blocks.arena(), theirs.table[block]),
                              std::min(block_tokens, theirs.slots - first));
                compared_sealed += sealed ? 1 : 0;
            }
        }
    }
    kv_step_report reports[2];     ///< of the last step
    uint64_t compared_sealed = 0;  ///< blocks
    uint64_t compared_words = 0, compared_outputs = 0;

    twin_device& device() { return device_; }

  private:
    struct sequence_state_pair {
        const kvrt::sequence* device;
        const kvrt::sequence* cpu;
    };

    void compare_block(const tile_layout& layout, const std::byte* on_device,
                       const std::byte* on_cpu, uint32_t slots) {
        const auto compare_bytes = [&](int64_t offset, uint32_t bytes) {
            if (std::memcmp(on_device + offset, on_cpu + offset, bytes) != 0) ++differences;
            ++compared_words;
        };
        for (const operand_layout* operand : {&layout.keys, &layout.values}) {
            for (uint32_t head = 0; head < layout.kv_heads; ++head) {
                if (operand->tiled()) compare_bytes(operand->tile_at(head), operand->tile_bytes);
                for (uint32_t slot = 0; slot < slots; ++slot) {
                    for (uint32_t word = 0; word < operand->words; ++word) {
                        compare_bytes(operand->at(slot, head, word), operand->word_bytes);
                    }
                }
            }
        }
    }

    void compare(device_pointer from, const std::vector<float>& expected, double bound) {
        const float* const got =
            reinterpret_cast<const float*>(device_.view(from, expected.size() * sizeof(float)));
        if (got == nullptr) return;
        double largest = 0.0;
        for (const float each : expected) largest = std::max(largest, std::abs(double{each}));
        bool differs = false;
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const double error = std::abs(double{got[i]} - double{expected[i]}) / largest;
            if (!(error <= worst)) worst = error;
            differs = differs || !(error <= bound);
        }
        differences += differs ? 1 : 0;
        ++compared_outputs;
    }

    twin_device& device_;
    std::vector<std::byte> stored_block_;
    std::vector<device_pointer> memory_;
    std::size_t used_ = 0;  ///< of the last
};

/// The fake driver with the kernels themselves.
struct fake_side {
    kernel_faults faults;
    with_images images;
    cuda_host host;
    fake_twin_device fake_device{host};

    fake_side() { add_kernels(host.fake, faults); }
};
class twin_pools : public fake_side, public twin_pools_on {
  public:
    template <class... others>
    explicit twin_pools(uint32_t flags = 0, others&&... more)
        : twin_pools_on(fake_device, flags, std::forward<others>(more)...) {}
};

}  // namespace kvrt::cuda
