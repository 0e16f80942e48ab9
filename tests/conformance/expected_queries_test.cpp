// What Expected Attention knows of queries, through the calls of an engine: means and covariances
// that a sequence gathers, what becomes of them, and that rounds work with them.
#include <filesystem>
#include <random>

#include "scorer_reference.hpp"

using namespace conformance;

namespace {

constexpr uint32_t query_heads = 4, key_dim = 32, bands = key_dim / 2;

pool_shape shape_of() {
    layer_shape plain;
    plain.kv_heads = 2;
    plain.query_heads = query_heads;
    plain.key_dim = key_dim;
    plain.value_dim = 32;
    plain.key_format = plain.value_format = KV_FORMAT_F32;
    pool_shape shape;
    shape.layers = {plain, plain};
    shape.slabs = 8;
    shape.max_tokens = 512;
    return shape;
}

struct moments {
    std::vector<float> arrays[6];  // means: real, imaginary, magnitude; variances, covariance
    kv_query_statistics found = KV_INIT(kv_query_statistics);

    explicit moments(uint32_t layer, bool covariances = true) {
        for (std::vector<float>& array : arrays) array.assign(query_heads * bands, -9.0f);
        found.layer = layer;
        found.query_heads = query_heads;
        found.bands = bands;
        found.mean_real = arrays[0].data();
        found.mean_imaginary = arrays[1].data();
        found.mean_magnitude = arrays[2].data();
        if (!covariances) return;
        found.variance_real = arrays[3].data();
        found.variance_imaginary = arrays[4].data();
        found.covariance = arrays[5].data();
    }
};

void check_moments(const tracker& t, uint32_t layer) {
    moments found(layer), without(layer, false);
    require_ok(kv_seq_get_statistics(t.host().pool(), t.sequence, &found.found));
    require_ok(kv_seq_get_statistics(t.host().pool(), t.sequence, &without.found));
    const tracked_layer& seen = t.layers[layer];
    REQUIRE(found.found.tokens == seen.queries.size());
    for (uint32_t i = 0; i < 3; ++i) CHECK(found.arrays[i] == without.arrays[i]);
    CHECK(without.arrays[3][0] == -9.0f);
    const double tokens = static_cast<double>(seen.queries.size());
    for (uint32_t head = 0; head < query_heads; ++head) {
        for (uint32_t band = 0; band < bands; ++band) {
            std::complex<double> mean = 0.0;
            std::vector<std::complex<double>> queries;
            for (std::size_t i = 0; i < seen.queries.size(); ++i) {
                const double* q = seen.queries[i].data() + std::size_t{head} * key_dim;
                const double angle = std::pow(10000.0, -2.0 * band / key_dim) *
                                     static_cast<double>(seen.query_positions[i]);
                queries.push_back(std::complex<double>(q[band], q[band + bands]) *
                                  std::polar(1.0, -angle));
                mean += queries.back() / tokens;
            }
            double first = 0.0, second = 0.0, both = 0.0;
            for (const std::complex<double>& q : queries) {
                const std::complex<double> off = q - mean;
                first += off.real() * off.real() / tokens;
                second += off.imag() * off.imag() / tokens;
                both += off.real() * off.imag() / tokens;
            }
            const uint32_t at = head * bands + band;
            CHECK(std::abs(found.arrays[0][at] - mean.real()) < 1e-5);
            CHECK(std::abs(found.arrays[1][at] - mean.imag()) < 1e-5);
            CHECK(std::abs(found.arrays[3][at] - first) < 1e-5);
            CHECK(std::abs(found.arrays[4][at] - second) < 1e-5);
            CHECK(std::abs(found.arrays[5][at] - both) < 1e-5);
        }
    }
}

kv_policy expected(uint32_t flags) {
    kv_policy policy = policy_of(KV_SCORER_EXPECTED_ATTENTION, 60);
    policy.recent = 5;
    policy.sinks = 4;
    policy.flags = flags;
    return policy;
}

std::vector<uint32_t> kept(engine& host, kv_seq sequence) {
    require_ok(kv_compress(host.pool(), sequence, nullptr, nullptr));
    return host.positions(sequence, 1, 1);
}

}  // namespace

TEST_CASE("covariances of queries: those of steps that ended, in forks, after truncation") {
    engine host(shape_of());
    tracker t(host, host.create(nullptr, true), 1);
    t.step(40);
    for (int i = 0; i < 5; ++i) t.step(1);
    check_moments(t, 0);
    check_moments(t, 1);

    kv_step* step = host.begin({{t.sequence, 9, 7}});
    for (uint32_t layer = 0; layer < 2; ++layer) {
        host.write(step, layer);
        host.attend(step, layer);
    }
    require_ok(kv_step_cancel(step));
    check_moments(t, 1);

    tracker child = t.fork(2);
    check_moments(child, 1);
    child.step(11);
    child.step(1);
    check_moments(child, 0);
    check_moments(child, 1);
    check_moments(t, 1);

    // What was seen stays seen.
    moments before(1), after(1);
    require_ok(kv_seq_get_statistics(host.pool(), child.sequence, &before.found));
    child.truncate(30);
    require_ok(kv_seq_get_statistics(host.pool(), child.sequence, &after.found));
    for (uint32_t i = 0; i < 6; ++i) CHECK(before.arrays[i] == after.arrays[i]);
}

TEST_CASE("covariances of queries: a round takes its sequence's, the host's, or those of a file") {
    const std::string path = std::filesystem::temp_directory_path() /
                             ("kvrt_expected_" + std::to_string(std::random_device()()));
    const kv_policy online = expected(KV_POLICY_STATISTICS_ONLINE), given = expected(0);
    engine host(shape_of());
    const auto filled = [&](const kv_policy& policy) {
        const kv_seq sequence = host.create(&policy);
        host.run({{sequence, 5, 200}});
        return sequence;
    };
    const kv_seq own = filled(online);
    moments found[2] = {moments(0), moments(1)};
    for (moments& layer : found) {
        require_ok(kv_seq_get_statistics(host.pool(), own, &layer.found));
    }
    require_ok(kv_seq_save_statistics(host.pool(), own, path.c_str()));
    const std::vector<uint32_t> wanted = kept(host, own);

    for (moments& layer : found) {
        require_ok(kv_pool_set_statistics(host.pool(), &layer.found));
    }
    CHECK(kept(host, filled(given)) == wanted);
    // By means alone others stay.
    for (moments& layer : found) {
        kv_query_statistics means = layer.found;
        means.variance_real = means.variance_imaginary = means.covariance = nullptr;
        require_ok(kv_pool_set_statistics(host.pool(), &means));
    }
    CHECK(kept(host, filled(given)) != wanted);
    require_ok(kv_pool_load_statistics(host.pool(), path.c_str()));
    std::filesystem::remove(path);
    CHECK(kept(host, filled(given)) == wanted);

    // All or none, and no more together than alone.
    kv_query_statistics wrong = found[0].found;
    wrong.covariance = nullptr;
    CHECK(kv_pool_set_statistics(host.pool(), &wrong) == KV_INVALID);
    CHECK(kv_seq_get_statistics(host.pool(), own, &wrong) == KV_INVALID);
    for (const float value : {-1.0f, NAN, INFINITY}) {
        for (uint32_t i = 3; i < 6; ++i) {
            moments bad = found[0];
            kv_query_statistics impossible = found[0].found;
            bad.arrays[i][2] = i == 5 && value < 0.0f ? -100.0f : value;
            impossible.variance_real = bad.arrays[3].data();
            impossible.variance_imaginary = bad.arrays[4].data();
            impossible.covariance = bad.arrays[5].data();
            CHECK(kv_pool_set_statistics(host.pool(), &impossible) == KV_INVALID);
        }
    }
}
