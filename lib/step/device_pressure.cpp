#include "step/device_pressure.hpp"

#include "step/round_cohort.hpp"

namespace kvrt {

namespace {

bool is_pressed(const cache& store) {
    return store.blocks.totals().pinned_bytes > store.limits.pressure_bytes;
}

/// All that can be, in as many lists as that takes.
status demote(step& target) {
    cache& store = *target.context->store;
    uint64_t before = 0;
    do {
        before = target.demoted.blocks;
        KVRT_TRY(target.context->seals.relieve_pressure(target));
    } while (is_pressed(store) && target.demoted.blocks != before);
    return KV_OK;
}

void evict(step& target, round_cohort& cohort) {
    cache& store = *target.context->store;
    for (sequence& owner : store.sequences) owner.asked_under_pressure = false;
    const auto is_free = [](const sequence& owner) { return !owner.in_step; };
    const auto above = [&](const sequence& owner) {
        return owner.has_policy ? tokens_above_budget(store, owner) : 0;
    };
    while (is_pressed(store)) {
        sequence* const chosen = ask_next(store, is_free, above);
        if (chosen == nullptr) return;
        cohort.add(*chosen, chosen->policy);
        cohort.flush();  // what it gives back is counted before another is asked
    }
}

}  // namespace

status relieve_pressure_on_device(step& target, kv_step_report& report) {
    cache& store = *target.context->store;
    if (store.limits.pressure_bytes == 0 || !is_pressed(store)) return KV_OK;
    struct listening {
        step& target;
        kv_step_report& report;
    } both{target, report};
    const round_listener listener = {
        &both, [](void* user, sequence& owner, status verdict, const compaction_report& round) {
            const listening& to = *static_cast<listening*>(user);
            to.report.blocks_returned += round.returned.blocks;
            to.report.bytes_returned += round.returned.bytes;
            if (verdict < 0 || round.outcome != KV_COMPRESS_DONE) {
                ++owner.rounds_skipped;
            } else {
                ++to.report.pressure_rounds;
            }
        }};
    round_cohort cohort(*target.context, target.number, listener);
    status verdict = KV_OK;
    if (store.any_seals) {
        KVRT_TRY(cohort.open());
        verdict = demote(target);
    }
    // Where lists found no room to go up, the next reserve demotes first.
    if (verdict == KV_OK) evict(target, cohort);
    const status ended = cohort.finish();
    return verdict < 0 && verdict != KV_AGAIN ? verdict : ended;
}

}  // namespace kvrt
