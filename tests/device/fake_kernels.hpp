// The kernels themselves on the fake driver: a launch runs the body that the name stands for under
// the block emulator, with the parameters that the plugin passed, over the fake's memory.
#pragma once

#include "fake_driver.hpp"
#include "kernels/allocate.hpp"
#include "kernels/attend_rows.hpp"
#include "kernels/blend.hpp"
#include "kernels/compact_tiles.hpp"
#include "kernels/copy.hpp"
#include "kernels/gather_queries.hpp"
#include "kernels/give.hpp"
#include "kernels/normalise.hpp"
#include "kernels/observe.hpp"
#include "kernels/pool.hpp"
#include "kernels/quota.hpp"
#include "kernels/sample.hpp"
#include "kernels/score.hpp"
#include "kernels/score_expected.hpp"
#include "kernels/score_lag.hpp"
#include "kernels/score_products.hpp"
#include "kernels/seal.hpp"
#include "kernels/select.hpp"
#include "kernels/share.hpp"
#include "kernels/write.hpp"

namespace kvrt::cuda {

/// What a test does to launches before they run, to see that it would be noticed.
struct kernel_faults {
    std::function<void(kernels::share_parameters&)> share;
    std::function<void(kernels::write_parameters&)> write;
    std::function<void(kernels::attend_parameters&)> attend;
    std::function<void(kernels::seal_parameters&)> seal;
    std::function<void(kernels::rows_parameters&)> attend_rows;
    std::function<bool(kernels::spread_parameters&)> spread;  ///< false: it does not run
    std::function<void(kernels::guard_parameters&)> guard;
    std::function<void(kernels::triattention_parameters&)> score;
    std::function<void(kernels::query_parameters&)> gather;
    std::function<void(kernels::lag_parameters&)> lag;
    std::function<void(kernels::expected_parameters&)> expected;
    std::function<void(kernels::product_parameters&)> product;  ///< of any kernel around one
    std::function<void(kernels::select_parameters&)> select;
    std::function<void(kernels::counting_parameters&)> counting;
    std::function<void(kernels::compact_parameters&)> compact;
    std::function<void(kernels::compact_sealed_parameters&)> compact_sealed;
    std::function<void(kernels::compact_tiles_parameters&)> compact_tiles;
    std::function<void(kernels::open_lanes_parameters&)> open_lanes;
    std::function<void(kernels::join_parameters&)> join;
    std::function<void(kernels::quota_parameters&)> quota;
    std::function<void(kernels::measure_parameters&)> measure;
    std::function<void(kernels::observe_parameters&)> observe;
    std::function<void(kernels::pool_parameters&)> pool;
    std::function<void(kernels::give_parameters&)> give;
    std::function<void(kernels::blend_parameters&)> blend;
    std::function<void(kernels::sample_parameters&)> sample;
};

/// All kernels that the plugin asks for. Those that these tests do not use report a violation
/// when they run. `faults` outlives the driver.
void add_kernels(fake_driver& fake, const kernel_faults& faults);

/// Those of rounds, which add_kernels adds.
void add_round_kernels(fake_driver& fake, const kernel_faults& faults);

/// As if the plugin had been built with nvcc, while it lives.
class with_images {
  public:
    with_images();
    with_images(const with_images&) = delete;
    with_images& operator=(const with_images&) = delete;
    ~with_images();
};

}  // namespace kvrt::cuda
