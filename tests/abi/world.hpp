// A pool to be attacked, and the checks that every attack must pass: the documented status, one
// line of message that names the argument, and a pool in which nothing has changed.
//
//   small_model   three layers: full, window 32 with sinks, and one that shares layer 0's cache
//   live_pool     a pool of it; releases itself
//   refuses(...)  one call that must fail
//   accepts(...)  one call that must succeed, and leave the message alone
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kvrt/kvrt.h"

namespace abi {

inline std::string last_error() {
    std::string text(kv_last_error(nullptr, 0), '\0');
    kv_last_error(text.data(), text.size() + 1);
    return text;
}

constexpr uint32_t query_heads = 4;
constexpr uint32_t kv_heads = 2;
constexpr uint32_t key_dim = 64;
constexpr uint32_t value_dim = 32;

struct small_model {
    std::vector<double> frequencies;
    std::vector<float> head_values;
    kv_rope rope = KV_INIT(kv_rope);
    std::vector<kv_layer> layers;

    small_model() : frequencies(key_dim / 2, 0.5), head_values(query_heads, 0.25f) {
        rope.style = KV_ROPE_HALF;
        rope.inverse_frequencies = frequencies.data();
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = query_heads;
        layer.kv_heads = kv_heads;
        layer.key_dim = key_dim;
        layer.value_dim = value_dim;
        layer.rope = &rope;
        layers.assign(3, layer);
        layers[1].window = 32;
        layers[1].window_sinks = 4;
        layers[2].flags = KV_LAYER_SHARED;
        layers[2].shared_layer = 0;
    }
    small_model(const small_model&) = delete;
    small_model& operator=(const small_model&) = delete;

    kv_model describe() const {
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = static_cast<uint32_t>(layers.size());
        return model;
    }
};

inline kv_pool_config small_config(uint32_t flags = 0) {
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.flags = flags;
    config.arena_bytes = uint64_t{4} << 20;
    config.max_sequences = 8;
    config.max_tokens_per_sequence = 256;
    config.max_step_sequences = 4;
    config.max_step_tokens = 128;
    config.threads = 1;
    return config;
}

/// Dense tensors of ones for `rows` rows, with room to spare.
struct tensors {
    std::vector<float> numbers;
    kv_tensor keys, values, queries, out;

    explicit tensors(uint64_t rows)
        : numbers(rows * query_heads * key_dim + 16, 1.0f),
          keys(make(rows, kv_heads, key_dim)),
          values(make(rows, kv_heads, value_dim)),
          queries(make(rows, query_heads, key_dim)),
          out(make(rows, query_heads, value_dim)),
          results(rows * query_heads * value_dim + 16) {
        out.data = results.data();
    }
    tensors(const tensors&) = delete;
    tensors& operator=(const tensors&) = delete;

  private:
    std::vector<float> results;

    kv_tensor make(uint64_t rows, uint64_t heads, uint64_t dim) {
        kv_tensor tensor = KV_INIT(kv_tensor);
        tensor.data = numbers.data();
        tensor.dtype = KV_DTYPE_F32;
        tensor.rows = rows;
        tensor.heads = heads;
        tensor.dim = dim;
        return tensor;
    }
};

struct live_pool {
    small_model model;
    kv_pool* handle = nullptr;

    explicit live_pool(const kv_pool_config& config = small_config()) {
        const kv_model description = model.describe();
        REQUIRE(kv_pool_create(&config, &description, &handle) == KV_OK);
    }
    live_pool(const live_pool&) = delete;
    live_pool& operator=(const live_pool&) = delete;
    ~live_pool() { kv_pool_release(handle); }

    operator kv_pool*() const { return handle; }

    kv_seq create_sequence(const kv_policy* policy = nullptr) const {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy;
        kv_seq seq = 0;
        REQUIRE(kv_seq_create(handle, &config, &seq) == KV_OK);
        return seq;
    }

    kv_step* begin() const {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(handle, &step) == KV_OK);
        return step;
    }

    /// A reserved step with `count` tokens of `seq`.
    kv_step* reserve(kv_seq seq, uint32_t count) const {
        kv_step* step = begin();
        REQUIRE(kv_seq_append(step, seq, nullptr, count, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        return step;
    }

    /// Writes both layers that store.
    void write(kv_step* step, uint32_t rows) const {
        const tensors t(rows);
        REQUIRE(kv_write(step, 0, &t.keys, &t.values) == KV_OK);
        REQUIRE(kv_write(step, 1, &t.keys, &t.values) == KV_OK);
    }

    void append(kv_seq seq, uint32_t count) const {
        kv_step* step = reserve(seq, count);
        write(step, count);
        REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    }

    kv_pool_stats stats() const {
        kv_pool_stats result = KV_INIT(kv_pool_stats);
        REQUIRE(kv_pool_get_stats(handle, &result) == KV_OK);
        return result;
    }

    kv_seq_info info(kv_seq seq) const {
        kv_seq_info result = KV_INIT(kv_seq_info);
        REQUIRE(kv_seq_get_info(handle, seq, &result) == KV_OK);
        return result;
    }
};

/// Everything that can be read about a pool and some of its sequences, as bytes.
class snapshot {
  public:
    snapshot(kv_pool* pool, const std::vector<kv_seq>& sequences) {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        if (pool == nullptr) return;
        REQUIRE(kv_pool_get_stats(pool, &stats) == KV_OK);
        add(stats);
        for (uint32_t c = 0; c < stats.classes; ++c) {
            kv_class_stats one = KV_INIT(kv_class_stats);
            REQUIRE(kv_pool_get_class_stats(pool, c, &one) == KV_OK);
            add(one);
        }
        for (const kv_seq seq : sequences) {
            kv_seq_info info = KV_INIT(kv_seq_info);
            REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
            add(info);
            for (uint32_t layer = 0; layer < 2; ++layer) {
                kv_seq_layer_info one = KV_INIT(kv_seq_layer_info);
                REQUIRE(kv_seq_get_layer_info(pool, seq, layer, &one) == KV_OK);
                add(one);
                uint32_t positions[256] = {};
                uint64_t count = 0;
                REQUIRE(kv_seq_get_positions(pool, seq, layer, 0, 256, positions, &count) == KV_OK);
                add(positions);
            }
        }
        REQUIRE(kv_pool_check(pool) == KV_OK);
    }
    bool operator==(const snapshot& other) const { return bytes_ == other.bytes_; }

  private:
    template <class struct_type>
    void add(const struct_type& value) {
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    std::string bytes_;
};

/// What an attack must leave alone.
struct target {
    kv_pool* pool = nullptr;
    std::vector<kv_seq> sequences;
};

/// Another call's message, so that a call that sets none is noticed.
inline void set_other_message() { CHECK(kv_pool_check(nullptr) == KV_INVALID); }

template <class callable>
void refuses(const target& attacked, kv_status expected, const char* word, const char* text,
             const callable& call) {
    INFO(text);
    const snapshot before(attacked.pool, attacked.sequences);
    set_other_message();
    const std::string other = last_error();
    const kv_status verdict = call();
    const std::string message = last_error();
    INFO(kv_status_name(verdict), ": ", message);
    CHECK(verdict == expected);
    CHECK_FALSE(message.empty());
    CHECK((message != other || std::string("pool is NULL").find(word) != std::string::npos));
    CHECK(message.find(word) != std::string::npos);
    CHECK(message.find('\n') == std::string::npos);
    CHECK(snapshot(attacked.pool, attacked.sequences) == before);
}

template <class callable>
void accepts(const char* text, const callable& call) {
    INFO(text);
    set_other_message();
    const std::string before = last_error();
    const kv_status verdict = call();
    INFO(last_error());
    CHECK(verdict == KV_OK);
    CHECK(last_error() == before);
}

#define REFUSES(attacked, expected, word, expression) \
    ::abi::refuses(attacked, expected, word, #expression, [&] { return expression; })
#define ACCEPTS(expression) ::abi::accepts(#expression, [&] { return expression; })

/// Memory for a struct of any size, on its alignment.
template <class struct_type>
class resized {
  public:
    resized(const struct_type& good, uint32_t size) : words_(8192 / 8 + 2) {
        std::memcpy(words_.data(), &good, sizeof good);
        std::memcpy(words_.data(), &size, sizeof size);
    }
    struct_type* get() { return reinterpret_cast<struct_type*>(words_.data()); }
    unsigned char* bytes() { return reinterpret_cast<unsigned char*>(words_.data()); }

  private:
    std::vector<uint64_t> words_;
};

/// Tries every wrong header that a struct can have. `call(pointer)` must refuse each.
template <class struct_type, class callable>
void refuses_wrong_headers(const target& attacked, const char* name, struct_type good,
                           const callable& call) {
    CAPTURE(name);
    const uint32_t known = sizeof(struct_type);
    for (const uint32_t size : {0u, 1u, 15u, 0x10001u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        CAPTURE(size);
        resized<struct_type> wrong(good, size);
        REFUSES(attacked, KV_INVALID, name, call(wrong.get()));
    }
    for (const uint32_t at : {known, known + 1, known + 63, 4095u}) {
        CAPTURE(at);
        resized<struct_type> larger(good, 4096);
        larger.bytes()[at] = 1;
        REFUSES(attacked, KV_UNSUPPORTED, name, call(larger.get()));
    }
    resized<struct_type> extended(good, known);
    extended.get()->next = &good;
    REFUSES(attacked, KV_UNSUPPORTED, name, call(extended.get()));
    resized<struct_type> flagged(good, known);
    flagged.get()->flags |= 0x80000000u;
    REFUSES(attacked, KV_UNSUPPORTED, name, call(flagged.get()));
}

}  // namespace abi
