// What attention keeps of its weights, against the definition in double.
#include "attention_fixture.hpp"

using namespace kvrt;
using namespace attention_test;
using paged_test::on_every_target;

namespace {

struct started_executor {
    host_allocator allocator;
    executor threads;
    explicit started_executor(uint32_t count) {
        REQUIRE(threads.start(allocator, count, nullptr) == KV_OK);
    }
};

/// How one problem is observed.
struct observation {
    uint32_t slots_before = 0;
    uint32_t first_row = 0;
    float decay = 1.0f;
    bool counts = false;
    std::vector<float> before;  // [kv_heads][stride]
    uint64_t stride = 0;

    observation(const problem& of, uint32_t known, std::mt19937& random)
        : slots_before(known), stride((of.slots + 63) / 64 * 64) {
        std::uniform_real_distribution<float> mass(0.0f, 3.0f);
        before.resize(of.layer.kv_heads * stride);
        for (float& value : before) value = mass(random);
    }
};

std::vector<float> observe(const problem& from, const observation& how, executor& threads,
                           result& attended, uint64_t spare = 0) {
    const uint32_t heads = from.layer.query_heads;
    const uint32_t key_dim = from.cache.layout.keys.dim, value_dim = from.cache.layout.values.dim;
    std::vector<float> memory(from.layer.kv_heads * how.stride + 16, -7.0f);
    const uintptr_t place = reinterpret_cast<uintptr_t>(memory.data());
    float* sums = memory.data() + ((place + 63) / 64 * 64 - place) / sizeof(float);
    attended.out.assign(std::size_t{from.rows} * heads * value_dim, -1.0f);
    attended.log_sum_exp.assign(std::size_t{from.rows} * heads, -1.0f);
    attend_observer observer;
    observer.sums = sums;
    observer.before = how.slots_before == 0 ? nullptr : how.before.data();
    observer.slots_before = how.slots_before;
    observer.stride = how.stride;
    observer.first_row = how.first_row;
    observer.decay = how.decay;
    observer.counts = how.counts;
    attend_item item = from.item();
    item.observer = &observer;
    std::vector<std::byte> workspace(attend_workspace_bytes(from.layer, from.slots, true) + spare);
    attend_call call;
    call.layer = &from.layer;
    call.arena = from.cache.arena;
    call.items = &item;
    call.item_count = 1;
    call.queries = {reinterpret_cast<std::byte*>(const_cast<float*>(from.queries.data())),
                    element::f32, int64_t{heads} * key_dim, key_dim, 1};
    call.out = {reinterpret_cast<std::byte*>(attended.out.data()), element::f32,
                int64_t{heads} * value_dim, value_dim, 1};
    call.log_sum_exp = attended.log_sum_exp.data();
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    attend(call, threads);
    for (uint32_t head = 0; head < from.layer.kv_heads; ++head) {  // what is behind means nothing
        std::fill(sums + head * how.stride + from.slots, sums + (head + 1) * how.stride, 0.0f);
    }
    return {sums, sums + from.layer.kv_heads * how.stride};
}

/// The sums by definition; in `margin`, how far a count may be off because a weight is close to the
/// threshold.
std::vector<double> expected_sums(const problem& from, const observation& how,
                                  std::vector<double>& margin) {
    const uint32_t group = from.layer.query_heads / from.layer.kv_heads;
    std::vector<double> sums(from.layer.kv_heads * how.stride);
    margin.assign(sums.size(), 0.0);
    for (uint32_t kv_head = 0; kv_head < from.layer.kv_heads; ++kv_head) {
        double* mine = sums.data() + kv_head * how.stride;
        for (uint32_t slot = 0; slot < how.slots_before; ++slot) {
            mine[slot] = double{how.before[kv_head * how.stride + slot]};
        }
        for (uint32_t row = how.first_row; row < from.rows; ++row) {
            for (uint32_t slot = 0; slot < from.slots; ++slot) mine[slot] *= double{how.decay};
            const double seen = from.slots - (from.rows - 1 - row);
            for (uint32_t g = 0; g < group; ++g) {
                const uint32_t head = kv_head * group + g;
                const std::vector<double> logits = from.logits_of(row, head);
                double largest = from.sinks.empty() ? -1e300 : double{from.sinks[head]};
                for (const double logit : logits) largest = std::max(largest, logit);
                double total = from.sinks.empty() ? 0.0 : std::exp(from.sinks[head] - largest);
                for (const double logit : logits) total += std::exp(logit - largest);
                for (uint32_t slot = 0; slot < from.slots; ++slot) {
                    const double weight = std::exp(logits[slot] - largest) / total;
                    if (!how.counts) {
                        mine[slot] += weight;
                        continue;
                    }
                    mine[slot] += weight >= 1.0 / seen ? 1.0 : 0.0;
                    if (std::abs(weight * seen - 1.0) < 2e-3) {
                        margin[kv_head * how.stride + slot] += 1.0;
                    }
                }
            }
        }
    }
    return sums;
}

/// The largest error, relative to 1 and to the sum.
double distance_of_sums(const problem& from, const observation& how,
                        const std::vector<float>& got) {
    std::vector<double> margin;
    const std::vector<double> expected = expected_sums(from, how, margin);
    double worst = 0;
    for (uint32_t head = 0; head < from.layer.kv_heads; ++head) {
        for (uint32_t slot = 0; slot < from.slots; ++slot) {
            const std::size_t i = head * how.stride + slot;
            const double off = std::abs(got[i] - expected[i]) - margin[i];
            worst = std::max(worst, off / (1 + expected[i]));
            if (std::isnan(got[i])) worst = 1e9;
        }
    }
    return worst;
}

problem draw(std::mt19937& random) {
    const auto pick = [&](std::initializer_list<uint32_t> choices) {
        return choices.begin()[random() % choices.size()];
    };
    const uint32_t rows = pick({1, 1, 1, 2, 5, 9, 30, 70});
    const uint32_t slots = rows + random() % pick({1, 30, 150, 700});
    const tile_order order = random() % 3 == 0 ? tile_order::hnd : tile_order::native;
    const uint32_t formats[] = {KV_FORMAT_F32,  KV_FORMAT_F16,        KV_FORMAT_BF16,
                                KV_FORMAT_Q8_0, KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN};
    const uint32_t format = formats[random() % 6];
    paged_cache cache(order, pick({16, 32, 64}), pick({1, 2, 3}), pick({64, 96, 128, 256}),
                      pick({32, 64, 128}), format, format, slots, static_cast<uint32_t>(random()));
    problem made(std::move(cache), pick({1, 2, 3, 4, 7, 9}), rows, slots, random);
    if (random() % 3 == 0) made.layer.softcap = 3.0f;
    if (random() % 3 == 0) made.add_sinks(random);
    if (random() % 3 == 0) made.add_slopes();
    return made;
}

}  // namespace

TEST_CASE("observed attention is what rows and heads gave each slot, for any geometry") {
    started_executor one(1);
    on_every_target([&] {
        std::mt19937 random(21);
        for (int trial = 0; trial < 60; ++trial) {
            CAPTURE(trial);
            const problem drawn = draw(random);
            observation how(drawn, random() % (drawn.slots + 1), random);
            how.first_row = random() % 2 == 0 ? 0 : random() % (drawn.rows + 2);
            how.decay = random() % 2 == 0 ? 1.0f : 0.75f;
            how.counts = random() % 3 == 0;
            result attended;
            const std::vector<float> sums = observe(drawn, how, one.threads, attended);
            // A weight is f16 until it is added: 2^-11 of it.
            CHECK(distance_of_sums(drawn, how, sums) < 1e-3);
            CHECK(attended == run(drawn, one.threads));
        }
    });
}

TEST_CASE("all that a head gives to all slots is 1, and without a sink logit nothing is lost") {
    started_executor one(1);
    std::mt19937 random(22);
    paged_cache cache(tile_order::native, 16, 2, 128, 128, element::f16, element::f16, 3000);
    problem drawn(std::move(cache), 4, 1, 3000, random);
    const observation how(drawn, 0, random);
    result attended;
    const std::vector<float> sums = observe(drawn, how, one.threads, attended);
    for (uint32_t head = 0; head < 2; ++head) {
        double total = 0;
        for (uint32_t slot = 0; slot < 3000; ++slot)
            total += double{sums[head * how.stride + slot]};
        CHECK(total == doctest::Approx(4.0).epsilon(1e-3));
    }
}

TEST_CASE("threads, pieces and workspace do not show in what was observed") {
    started_executor one(1), three(3);
    std::mt19937 random(23);
    for (int trial = 0; trial < 30; ++trial) {
        CAPTURE(trial);
        const problem drawn = draw(random);
        observation how(drawn, drawn.slots / 2, random);
        how.decay = 0.5f;
        result attended;
        const std::vector<float> alone = observe(drawn, how, one.threads, attended);
        CHECK(alone == observe(drawn, how, three.threads, attended));
        CHECK(alone == observe(drawn, how, three.threads, attended, 8 << 20));
    }
}

TEST_CASE("a row whose logits have no sum adds nothing to what was observed") {
    started_executor one(1);
    on_every_target([&] {
        std::mt19937 random(24);
        for (const uint32_t rows : {1u, 4u}) {
            paged_cache cache(tile_order::native, 16, 1, 64, 64, element::f32, element::f32, 90);
            problem drawn(std::move(cache), 2, rows, 90, random);
            const float nan = std::nanf("");
            // All queries of the last row.
            const std::size_t last = std::size_t{rows - 1} * 2 * 64;
            std::fill(drawn.queries.begin() + static_cast<std::ptrdiff_t>(last),
                      drawn.queries.end(), nan);
            observation how(drawn, 90, random);
            how.first_row = rows - 1;
            result attended;
            const std::vector<float> sums = observe(drawn, how, one.threads, attended);
            for (uint32_t slot = 0; slot < 90; ++slot) CHECK(sums[slot] == how.before[slot]);
        }
    });
}
