// TriAttention's scores as matrix products, in pools of a CUDA device over the fake driver and a
// fake cuBLASLt: a CPU pool says what stays. Which way was gone is asked as a host would.
#include "driver/measured_choice.hpp"
#include "fake_matrix_library.hpp"
#include "round_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr uint64_t small_workspace = uint64_t{1} << 20;

kv_status set_scoring(const round_pools& pools, uint32_t method, uint64_t workspace = 0,
                      uint32_t flags = 0) {
    kv_cuda_scoring scoring = KV_INIT(kv_cuda_scoring);
    scoring.method = method;
    scoring.workspace_bytes = workspace;
    scoring.flags = flags;
    return kv_cuda_pool_set_scoring(pools.pools[0], &scoring);
}
kv_cuda_scoring_report scoring_of(const round_pools& pools) {
    kv_cuda_scoring_report report = KV_INIT(kv_cuda_scoring_report);
    REQUIRE(kv_cuda_pool_get_scoring(pools.pools[0], &report) == KV_OK);
    return report;
}

kv_policy greatest_over_offsets() {
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.flags = KV_POLICY_OFFSETS_MAX;
    policy.offset_max = 64;
    return policy;
}

/// The library lives longer than the pools, and less long than the driver.
struct with_library {
    round_pools pools;
    std::unique_ptr<fake_matrix_library> library =
        std::make_unique<fake_matrix_library>(pools.host.fake);

    with_library() { pools.give_statistics(); }
    with_library(const with_library&) = delete;
    with_library& operator=(const with_library&) = delete;
    ~with_library() {
        pools.host.fake.run_all();
        kv_pool_release(pools.pools[0]);
        pools.pools[0] = nullptr;
        library.reset();
    }
};

/// Rounds of one sequence, that the device has done.
void run_rounds(round_pools& pools, twin_sequence& sequence, uint32_t rounds) {
    for (uint32_t i = 0; i < rounds; ++i) {
        pools.step({{&sequence, 8, 8}});
        pools.compare_reports();
        pools.host.fake.run_all();
    }
}

}  // namespace

TEST_CASE("rounds by matrix products keep what those on the CPU keep") {
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    SUBCASE("means over offsets") {}
    SUBCASE("the greatest over offsets") { policy = greatest_over_offsets(); }
    with_library both;
    round_pools& pools = both.pools;
    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, small_workspace) == KV_OK);
    drive(pools, policy, 15);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 8);
    CHECK(pools.compared_positions > 500);
    CHECK(pools.host.fake.synchronisations() == 0);
    const kv_cuda_scoring_report report = scoring_of(pools);
    CHECK(report.method == KV_CUDA_SCORE_PRODUCTS);
    CHECK(report.library_version == 130100);
    CHECK(report.workspace_bytes == small_workspace);
    CHECK(report.kernel_cohorts == 0);
    CHECK(report.product_cohorts > 20);
    CHECK(report.shape_misses < 10);
    CHECK(report.shape_hits > 3 * report.shape_misses);
    CHECK(report.shape_hits + report.shape_misses == both.library->calls("cublasLtMatmul"));
    CHECK(std::string(report.reason).empty());
}

TEST_CASE("what wrong products would do is found by the comparison with the CPU pool") {
    with_library both;
    round_pools& pools = both.pools;
    SUBCASE("a column that is another's") {
        both.library->change = [](layout_object&, layout_object& b, layout_object&) {
            b.leading -= 1;
        };
    }
    SUBCASE("keys of another head") {
        both.library->change = [](layout_object& a, layout_object&, layout_object&) {
            a.batch_stride = 0;
        };
    }
    SUBCASE("keys of other slots") {
        pools.faults.product = [](kernels::product_parameters& call) { call.first_slot += 16; };
    }
    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, small_workspace) == KV_OK);
    const kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    twin_sequence sequence = start(pools, 90, &policy);
    run_rounds(pools, sequence, 2);
    pools.compare_positions(sequence);
    CHECK(pools.differences > 0);
}

TEST_CASE("the faster of the two is measured, and nobody waits for it") {
    with_library both;
    round_pools& pools = both.pools;
    fake_driver& fake = pools.host.fake;
    bool products_are_faster = false;
    SUBCASE("the kernel") {}
    SUBCASE("products") { products_are_faster = true; }
    fake.durations["cublasLtMatmul"] = products_are_faster ? 5 : 5000;
    for (const char* name :
         {"kvrt_score_keys_f16_2", "kvrt_score_keys_bf16_2", "kvrt_score_keys_int8_token_2"}) {
        fake.durations[name] = 500;
    }
    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_MEASURED) == KV_OK);
    CHECK(scoring_of(pools).workspace_bytes == uint64_t{32} << 20);
    const kv_policy policy = greatest_over_offsets();
    twin_sequence sequence = start(pools, 56, &policy);

    // A device that is behind: what is under way is not waited for, and not timed again.
    fake.block(pools.host.stream);
    for (uint32_t i = 0; i < 3; ++i) pools.step({{&sequence, 8, 8}});
    CHECK(scoring_of(pools).open_kinds > 0);
    CHECK(scoring_of(pools).product_cohorts == 0);
    fake.unblock(pools.host.stream);
    fake.run_all();
    run_rounds(pools, sequence, 2 * measured_choice::trials);
    const kv_cuda_scoring_report decided = scoring_of(pools);
    CHECK(decided.open_kinds == 0);
    CHECK((decided.kernel_kinds > 0) == !products_are_faster);
    CHECK((decided.product_kinds > 0) == products_are_faster);
    CHECK(decided.product_cohorts > 0);

    run_rounds(pools, sequence, 2);
    const kv_cuda_scoring_report later = scoring_of(pools);
    CHECK((later.kernel_cohorts > decided.kernel_cohorts) == !products_are_faster);
    CHECK((later.product_cohorts > decided.product_cohorts) == products_are_faster);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
    CHECK(fake.synchronisations() == 0);

    // And a host can say otherwise.
    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_KERNEL) == KV_OK);
    run_rounds(pools, sequence, 1);
    CHECK(scoring_of(pools).product_cohorts == later.product_cohorts);
    CHECK(scoring_of(pools).kernel_cohorts > later.kernel_cohorts);
}

TEST_CASE("without a library of matrix products the kernel goes on, and it is said") {
    round_pools pools;
    pools.give_statistics();
    fake_matrix_library library(pools.host.fake);
    library.inject("cublasLtCreate", matrix_not_initialised);
    for (const uint32_t method : {KV_CUDA_SCORE_PRODUCTS, KV_CUDA_SCORE_MEASURED}) {
        CHECK(set_scoring(pools, method) == KV_DEVICE);
        CHECK(message_has("cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED"));
    }
    const kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    twin_sequence sequence = start(pools, 70, &policy);
    run_rounds(pools, sequence, 2);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
    const kv_cuda_scoring_report report = scoring_of(pools);
    CHECK(report.method == KV_CUDA_SCORE_KERNEL);
    CHECK(report.workspace_bytes == 0);
    CHECK(report.kernel_cohorts > 0);
    CHECK(report.product_cohorts == 0);
}

TEST_CASE("what the library has no algorithm for is the kernel's, unless the host wants products") {
    with_library both;
    round_pools& pools = both.pools;
    both.library->most_columns = 3;  // two query heads, and one offset
    const kv_policy policy = greatest_over_offsets();
    twin_sequence sequence = start(pools, 70, &policy);
    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_MEASURED, small_workspace) == KV_OK);
    run_rounds(pools, sequence, 4);
    const kv_cuda_scoring_report report = scoring_of(pools);
    CHECK(report.product_cohorts == 0);
    CHECK(report.kernel_cohorts > 0);
    CHECK(report.kernel_kinds > 0);
    CHECK(report.open_kinds == 0);
    CHECK(std::string(report.reason) ==
          "cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED (15)");
    pools.compare(sequence);
    CHECK(pools.differences == 0);

    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS) == KV_OK);
    kv_compress_options options = KV_INIT(kv_compress_options);
    kv_policy less = policy;
    less.budget = 20;
    options.policy = &less;
    CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_UNSUPPORTED);
    CHECK(message_has("cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED"));
}

TEST_CASE("products are set up once, and what they take is the pool's memory") {
    with_library both;
    round_pools& pools = both.pools;
    fake_driver& fake = pools.host.fake;
    CHECK(set_scoring(pools, 3) == KV_INVALID);
    CHECK(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, 1000) == KV_INVALID);
    CHECK(message_has("1048576"));
    CHECK(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, small_workspace, 2) == KV_UNSUPPORTED);
    fake.inject("cuMemAlloc_v2", error_out_of_memory);
    CHECK(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, small_workspace) == KV_NO_MEMORY);
    CHECK(scoring_of(pools).method == KV_CUDA_SCORE_KERNEL);
    const std::size_t before = fake.physical_bytes();
    REQUIRE(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, small_workspace) == KV_OK);
    CHECK(fake.physical_bytes() - before >= small_workspace);
    CHECK(set_scoring(pools, KV_CUDA_SCORE_MEASURED) == KV_OK);
    CHECK(set_scoring(pools, KV_CUDA_SCORE_MEASURED, small_workspace) == KV_OK);
    CHECK(set_scoring(pools, KV_CUDA_SCORE_MEASURED, 2 * small_workspace) == KV_INVALID);
    CHECK(set_scoring(pools, KV_CUDA_SCORE_PRODUCTS, 0, KV_CUDA_SCORING_TF32) == KV_INVALID);
    kv_cuda_scoring scoring = KV_INIT(kv_cuda_scoring);
    CHECK(kv_cuda_pool_set_scoring(pools.pools[1], &scoring) == KV_INVALID);
    kv_cuda_scoring_report report = KV_INIT(kv_cuda_scoring_report);
    CHECK(kv_cuda_pool_get_scoring(pools.pools[1], &report) == KV_INVALID);
    CHECK(both.library->calls("cublasLtCreate") == 2);
}
