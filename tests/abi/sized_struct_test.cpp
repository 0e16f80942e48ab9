// Structs of other versions: smaller ones get defaults, larger ones with a zero tail are taken, and
// results are filled up to the caller's size.
#include "abi/world.hpp"

using namespace abi;

namespace {

/// Calls with a result struct of every size that makes sense; checks what lies inside and beyond.
template <class struct_type, class callable>
void fills_any_size(const char* name, const callable& call) {
    CAPTURE(name);
    struct_type whole = KV_INIT(struct_type);
    REQUIRE(call(&whole) == KV_OK);
    const auto* expected = reinterpret_cast<const unsigned char*>(&whole);
    const uint32_t known = sizeof(struct_type);
    for (const uint32_t size : {16u, 20u, 24u, known - 8, known, known + 8, 4096u, 8192u}) {
        CAPTURE(size);
        resized<struct_type> sized(KV_INIT(struct_type), size);
        // What lies behind the struct is not the library's; what lies inside is overwritten.
        for (uint32_t at = 16; at < std::min(size, known); ++at) sized.bytes()[at] = 0;
        for (uint32_t at = size; at < size + 8; ++at) sized.bytes()[at] = 0xee;
        REQUIRE(call(sized.get()) == KV_OK);
        CHECK(sized.get()->struct_size == size);
        bool same = true;
        for (uint32_t at = 16; at < std::min(size, known); ++at) {
            same = same && sized.bytes()[at] == expected[at];
        }
        CHECK(same);
        bool tail_is_zero = true;
        for (uint32_t at = known; at < size; ++at) {
            tail_is_zero = tail_is_zero && sized.bytes()[at] == 0;
        }
        CHECK(tail_is_zero);
        for (uint32_t at = size; at < size + 8; ++at) CHECK(sized.bytes()[at] == 0xee);
    }
}

/// Zeroes a 64-bit field that differs from call to call; the struct may end before or inside it.
template <class struct_type>
void forget(struct_type* object, std::size_t offset) {
    const std::size_t end = std::min<std::size_t>(object->struct_size, offset + 8);
    if (end > offset) std::memset(reinterpret_cast<char*>(object) + offset, 0, end - offset);
}

TEST_CASE("result structs of every size are filled up to it") {
    const live_pool pool;
    const kv_seq seq = pool.create_sequence();
    pool.append(seq, 40);
    fills_any_size<kv_pool_stats>("kv_pool_stats",
                                  [&](kv_pool_stats* out) { return kv_pool_get_stats(pool, out); });
    fills_any_size<kv_class_stats>("kv_class_stats", [&](kv_class_stats* out) {
        return kv_pool_get_class_stats(pool, 0, out);
    });
    fills_any_size<kv_seq_info>("kv_seq_info",
                                [&](kv_seq_info* out) { return kv_seq_get_info(pool, seq, out); });
    fills_any_size<kv_seq_layer_info>("kv_seq_layer_info", [&](kv_seq_layer_info* out) {
        return kv_seq_get_layer_info(pool, seq, 1, out);
    });
    fills_any_size<kv_retention_info>("kv_retention_info", [&](kv_retention_info* info) {
        return kv_seq_get_retention(pool, seq, info);
    });
    fills_any_size<kv_policy_footprint>("kv_policy_footprint", [&](kv_policy_footprint* out) {
        kv_policy policy = KV_INIT(kv_policy);
        policy.scorer = KV_SCORER_STREAMING;
        policy.budget = 100;
        policy.every = 10;
        return kv_pool_policy_footprint(pool, &policy, out);
    });
    fills_any_size<kv_capabilities_report>(
        "kv_capabilities_report",
        [&](kv_capabilities_report* out) { return kv_capabilities(out); });
    fills_any_size<kv_compress_report>("kv_compress_report", [&](kv_compress_report* out) {
        kv_policy policy = KV_INIT(kv_policy);
        policy.scorer = KV_SCORER_STREAMING;
        policy.budget = 100;  // nothing to do, so that every report is the same
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &policy;
        const kv_status verdict = kv_compress(pool, seq, &options, out);
        forget(out, offsetof(kv_compress_report, nanoseconds));
        return verdict;
    });
    fills_any_size<kv_append_info>("kv_append_info", [&](kv_append_info* out) {
        kv_step* step = pool.begin();
        const kv_status verdict = kv_seq_append(step, seq, nullptr, 3, out);
        REQUIRE(kv_step_cancel(step) == KV_OK);
        return verdict;
    });
    fills_any_size<kv_reserve_report>("kv_reserve_report", [&](kv_reserve_report* out) {
        kv_step* step = pool.begin();
        REQUIRE(kv_seq_append(step, seq, nullptr, 30, nullptr) == KV_OK);
        const kv_status verdict = kv_step_reserve(step, out);
        REQUIRE(kv_step_cancel(step) == KV_OK);
        return verdict;
    });
    fills_any_size<kv_step_report>("kv_step_report", [&](kv_step_report* out) {
        kv_step* step = pool.reserve(seq, 1);
        pool.write(step, 1);
        const kv_status verdict = kv_step_end(step, out);
        forget(out, offsetof(kv_step_report, fence));
        return verdict;
    });
    fills_any_size<kv_tables>("kv_tables", [&](kv_tables* out) {
        kv_step* step = pool.reserve(seq, 1);
        const kv_status verdict = kv_step_export(step, 1, out);
        REQUIRE(kv_step_cancel(step) == KV_OK);
        forget(out, offsetof(kv_tables, fence));
        return verdict;
    });
    fills_any_size<kv_layer_stats>(
        "kv_layer_stats", [&](kv_layer_stats* out) { return kv_pool_get_layer_stats(pool, out); });
    fills_any_size<kv_plan_report>("kv_plan_report", [&](kv_plan_report* out) {
        const small_model model;
        const kv_model description = model.describe();
        const kv_pool_config config = small_config();
        return kv_plan(&config, &description, out);
    });
}

TEST_CASE("given structs: a missing tail means defaults, a zero tail is taken") {
    const small_model model;
    kv_model description = model.describe();
    kv_pool_config config = small_config();
    kv_plan_report whole = KV_INIT(kv_plan_report);
    config.max_step_sequences = 0;
    config.max_step_tokens = 0;
    config.threads = 0;
    REQUIRE(kv_plan(&config, &description, &whole) == KV_OK);
    // Cut behind max_tokens_per_sequence, as a version without the later fields would be.
    const uint32_t cut = offsetof(kv_pool_config, max_step_sequences);
    resized<kv_pool_config> smaller(config, cut);
    for (uint32_t at = cut; at < sizeof config; ++at) smaller.bytes()[at] = 0xee;
    resized<kv_pool_config> larger(config, 4096);
    resized<kv_model> larger_model(description, 2048);
    for (const kv_pool_config* variant : {smaller.get(), larger.get()}) {
        kv_plan_report report = KV_INIT(kv_plan_report);
        REQUIRE(kv_plan(variant, larger_model.get(), &report) == KV_OK);
        CHECK(std::memcmp(&report, &whole, sizeof report) == 0);
    }

    const live_pool pool;
    resized<kv_seq_config> header_only(KV_INIT(kv_seq_config), 16);
    kv_seq seq = 0;
    ACCEPTS(kv_seq_create(pool, header_only.get(), &seq));
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 16;
    resized<kv_policy> old_policy(policy, offsetof(kv_policy, every));
    ACCEPTS(kv_seq_set_policy(pool, seq, old_policy.get()));
    resized<kv_policy> empty_policy(policy, 16);
    REFUSES((target{pool, {seq}}), KV_UNSUPPORTED, "scorer",
            kv_seq_set_policy(pool, seq, empty_policy.get()));
}

TEST_CASE("a fit of another version: what it has no field for is left out") {
    const live_pool pool;
    const kv_seq seq = pool.create_sequence();
    pool.append(seq, 100);
    std::vector<float> numbers(2 * kv_heads * key_dim);
    kv_affine_fit whole = KV_INIT(kv_affine_fit);
    whole.kv_heads = kv_heads;
    whole.key_dim = key_dim;
    whole.channel_means = numbers.data();
    whole.channel_scales = numbers.data() + kv_heads * key_dim;
    resized<kv_affine_fit> smaller(whole, offsetof(kv_affine_fit, identity));
    resized<kv_affine_fit> larger(whole, 4096);
    smaller.get()->identity = 0xeeee;
    ACCEPTS(kv_seq_fit_affine(pool, seq, &whole));
    CHECK(whole.tokens_used == 100);
    CHECK(whole.identity != 0);
    ACCEPTS(kv_seq_fit_affine(pool, seq, smaller.get()));
    CHECK(smaller.get()->tokens_used == 100);
    CHECK(smaller.get()->identity == 0xeeee);
    ACCEPTS(kv_seq_fit_affine(pool, seq, larger.get()));
    CHECK(larger.get()->identity == whole.identity);
}

TEST_CASE("a reserved field that is not zero is refused, not ignored") {
    const live_pool pool;
    const kv_seq seq = pool.create_sequence();
    pool.append(seq, 3);
    const target attacked = {pool, {seq}};

    small_model description;
    const kv_model whole = description.describe();
    kv_model model = whole;
    model.reserved0 = 1;
    const kv_pool_config config = small_config();
    kv_pool* made = nullptr;
    REFUSES(target{}, KV_UNSUPPORTED, "model", kv_pool_create(&config, &model, &made));
    description.layers[1].reserved0 = 7;
    REFUSES(target{}, KV_UNSUPPORTED, "reserved0 is 7", kv_pool_create(&config, &whole, &made));
    CHECK(made == nullptr);

    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 2;
    policy.reserved0 = 1;
    REFUSES(attacked, KV_UNSUPPORTED, "policy", kv_seq_set_policy(pool, seq, &policy));
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    REFUSES(attacked, KV_UNSUPPORTED, "policy", kv_compress(pool, seq, &options, nullptr));
    policy.reserved0 = 0;
    policy.reserved1 = 1;
    REFUSES(attacked, KV_UNSUPPORTED, "reserved1 is 1", kv_seq_set_policy(pool, seq, &policy));
    REFUSES(attacked, KV_UNSUPPORTED, "reserved1 is 1", kv_compress(pool, seq, &options, nullptr));

    kv_query_statistics statistics = KV_INIT(kv_query_statistics);
    statistics.reserved0 = 1;
    REFUSES(attacked, KV_UNSUPPORTED, "statistics", kv_pool_set_statistics(pool, &statistics));
    REFUSES(attacked, KV_UNSUPPORTED, "statistics", kv_seq_get_statistics(pool, seq, &statistics));

    kv_step* step = pool.reserve(seq, 1);
    const tensors t(1);
    kv_tensor wrong = t.values;
    wrong.reserved0 = 1;
    REFUSES(attacked, KV_UNSUPPORTED, "values", kv_write(step, 0, &t.keys, &wrong));
    kv_tables tables = KV_INIT(kv_tables);
    tables.reserved0 = 1;
    REFUSES(attacked, KV_UNSUPPORTED, "tables", kv_step_export(step, 0, &tables));
    ACCEPTS(kv_step_cancel(step));
}

}  // namespace
