// A device that comes as a plugin: found and loaded when a pool first asks for it, so that this
// library needs neither its driver nor its runtime.
#pragma once

#include "base/host_memory.hpp"
#include "device/device.hpp"
#include "device/plugin.h"

namespace kvrt {

/// The CUDA plugin, loaded at the first call and kept. It is looked for, in this order:
///   the path in KVRT_CUDA_PLUGIN, if that is set, and nowhere else;
///   beside the file that this library is in;
///   where the system looks for shared libraries.
/// UNSUPPORTED says where that was, or that another version was found. Threads: safe.
status load_cuda_plugin(const kvrt_plugin*& out);

/// UNSUPPORTED where `plugin`, found at `place`, is not what this library can use.
status check_plugin(const kvrt_plugin* plugin, const char* place);

/// For tests: what load_cuda_plugin gives from now on; null: what it finds.
void replace_cuda_plugin(const kvrt_plugin* plugin);

/// Whose device memory a device works in; the driver's where `allocate` is null.
struct device_allocator {
    void* user = nullptr;
    void* (*allocate)(void* user, std::size_t bytes, std::size_t alignment) = nullptr;
    void (*release)(void* user, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
};

/// What a device would be opened on. UNSUPPORTED: there is none.
status describe_device(const kvrt_plugin& plugin, kvrt_device_description& out);

class plugin_device final : public device_memory, public inspected_memory, public step_clock {
  public:
    plugin_device() = default;
    plugin_device(const plugin_device&) = delete;
    plugin_device& operator=(const plugin_device&) = delete;
    ~plugin_device() override;

    /// `allocator` outlives it.
    status open(const kvrt_plugin& plugin, host_allocator& allocator, bool elastic,
                const device_allocator& of_device = {});
    bool is_open() const { return device_ != nullptr; }

    status reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) override;
    status commit(uint64_t offset, uint64_t bytes) override;
    void give_back(uint64_t offset, uint64_t bytes) override;
    void fill(uint64_t offset, uint64_t bytes, unsigned char value) override;
    status read(uint64_t first, uint64_t stride, uint64_t count, uint64_t bytes,
                std::byte* out) override;
    uint64_t mapped_bytes() const { return plugin_->mapped_bytes(device_); }

    status begin_step(uint64_t step, void* stream);
    status end_step(uint64_t step);
    status poll();
    bool passed(uint64_t step) const override;
    status copy(uint64_t step, uint64_t target, uint64_t source, uint64_t bytes);

    status create_table(uint64_t words, uint64_t staging_bytes, std::byte** out_address,
                        const uint32_t** out_image);
    void write_table(uint64_t first, const uint32_t* words, uint64_t count) {
        plugin_->write_table(device_, first, words, count);
    }
    void forget_table(uint64_t first, uint64_t count) {
        plugin_->forget_table(device_, first, count);
    }
    status upload_table(uint64_t step);

    /// UNSUPPORTED, with the reason, where the plugin has no kernels for this device.
    status kernels() const { return told(plugin_->kernels(device_)); }
    void bound_attention(kvrt_attend_bounds& bounds) const { plugin_->bound_attention(&bounds); }
    void plan_attention(kvrt_attend_plan& plan) const { plugin_->plan_attention(&plan); }
    bool advance_attention(const kvrt_attend_plan& plan, uint64_t sequences) {
        return plugin_->advance_attention(device_, &plan, sequences) != 0;
    }
    status share_plans(uint64_t step, const kvrt_share_plans& call) {
        return told(plugin_->share_plans(device_, step, &call));
    }
    status create_workspace(uint64_t bytes, std::byte** out_address);
    status create_sums(kvrt_sums_memory& memory) {
        return told(plugin_->create_sums(device_, &memory));
    }
    status write_rows(uint64_t step, const kvrt_write_rows& call) {
        return told(plugin_->write_rows(device_, step, &call));
    }
    status attend_rows(uint64_t step, kvrt_attend_rows& call) {
        return told(plugin_->attend_rows(device_, step, &call));
    }
    status seal_blocks(uint64_t step, const kvrt_seal_blocks& call) {
        return told(plugin_->seal_blocks(device_, step, &call));
    }
    status create_counters(uint64_t count, uint64_t** out_address) {
        return told(plugin_->create_counters(device_, count, out_address));
    }
    status fetch_counters(uint64_t step) { return told(plugin_->fetch_counters(device_, step)); }
    const uint64_t* arrived_counters() { return plugin_->arrived_counters(device_); }

    status create_rounds(kvrt_round_memory& memory) {
        return told(plugin_->create_rounds(device_, &memory));
    }
    status check_round(const kvrt_lane& lane, const kvrt_lane* sealed, uint32_t scorer) const {
        return told(plugin_->check_round(device_, &lane, sealed, scorer));
    }
    status check_value_ranges(const kvrt_lane& lane, const kvrt_lane* sealed) const {
        return told(plugin_->check_value_ranges(device_, &lane, sealed));
    }
    status create_queries(uint64_t places, kvrt_query_memory& memory) {
        return told(plugin_->create_queries(device_, places, &memory));
    }
    status gather_queries(uint64_t step, kvrt_gather_queries& call) {
        return told(plugin_->gather_queries(device_, step, &call));
    }
    status create_opened(uint64_t bytes) { return told(plugin_->create_opened(device_, bytes)); }
    status open_round(uint64_t step) { return told(plugin_->open_round(device_, step)); }
    status run_round(uint64_t step, kvrt_round& call) {
        return told(plugin_->run_round(device_, step, &call));
    }
    status read_words(uint64_t step, const kvrt_words* pieces, uint64_t count, uint32_t* out) {
        return told(plugin_->read_words(device_, step, pieces, count, out));
    }
    status copy_words(uint64_t step, uint32_t* target, const uint32_t* source, uint64_t words) {
        return told(plugin_->copy_words(device_, step, target, source, words));
    }
    status set_scoring(const kvrt_scoring& wanted) {
        return told(plugin_->set_scoring(device_, &wanted));
    }
    status create_given(uint64_t bytes) { return told(plugin_->create_given(device_, bytes)); }
    status give_scores(uint64_t step, const kvrt_given_scores& call) {
        return told(plugin_->give_scores(device_, step, &call));
    }
    void report_scoring(kvrt_scoring_report& report) const {
        plugin_->report_scoring(device_, &report);
    }

  private:
    /// The plugin's message becomes this library's.
    status told(status verdict) const;

    const kvrt_plugin* plugin_ = nullptr;
    kvrt_device* device_ = nullptr;
};

}  // namespace kvrt
