#include "driver/measured_choice.hpp"

#include <algorithm>

namespace kvrt::cuda {

measured_choice::~measured_choice() {
    if (device_ == nullptr) return;
    const current_context here(*device_);
    for (entry& each : entries_) {
        if (each.start != nullptr) (void)device_->calls().event_destroy(each.start);
        if (each.end != nullptr) (void)device_->calls().event_destroy(each.end);
    }
}

status measured_choice::find(const kind& of, entry*& out) {
    entry* oldest = &entries_[0];
    for (entry& each : entries_) {
        if (each.used != 0 && each.of == of) {
            each.used = ++clock_;
            out = &each;
            return KV_OK;
        }
        if (each.used < oldest->used) oldest = &each;
    }
    entry fresh;
    fresh.start = oldest->start;
    fresh.end = oldest->end;
    *oldest = fresh;
    for (event_handle* each : {&oldest->start, &oldest->end}) {
        if (*each != nullptr) continue;
        KVRT_TRY(device_->check(device_->calls().event_create(each, event_default),
                                "cuEventCreate (to time scores)"));
    }
    oldest->of = of;
    oldest->used = ++clock_;
    out = oldest;
    return KV_OK;
}

/// Takes what has been timed, if the device has come that far.
status measured_choice::ask(entry& about) {
    if (!about.waiting) return KV_OK;
    const driver& calls = device_->calls();
    driver_result result = calls.event_query(about.end);
    if (result == error_not_ready) return KV_OK;
    float milliseconds = 0.0f;
    if (result == success) result = calls.event_elapsed(&milliseconds, about.start, about.end);
    KVRT_TRY(device_->check(result, "cuEventElapsedTime (of scores)"));
    about.waiting = false;
    uint32_t& timed = about.timed[about.way];
    float& best = about.best[about.way];
    best = timed == 0 ? milliseconds : std::min(best, milliseconds);
    ++timed;
    if (about.timed[0] < trials || about.timed[1] < trials) return KV_OK;
    about.decided = true;
    about.way = about.best[1] < about.best[0] ? 1 : 0;
    return KV_OK;
}

status measured_choice::begin(const kind& of, stream_handle stream, trial& out) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    entry* found = nullptr;
    KVRT_TRY(find(of, found));
    KVRT_TRY(ask(*found));
    out.entry = static_cast<uint32_t>(found - entries_.data());
    out.timed = !found->decided && !found->waiting;
    if (out.timed) found->way = found->timed[1] < found->timed[0] ? 1 : 0;
    out.way = found->decided || out.timed ? found->way : 0;
    if (!out.timed) return KV_OK;
    return device_->check(device_->calls().event_record(found->start, stream),
                          "cuEventRecord (in front of scores)");
}

status measured_choice::end(const trial& work, stream_handle stream) {
    if (!work.timed) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    entry& timed = entries_[work.entry];
    KVRT_TRY(device_->check(device_->calls().event_record(timed.end, stream),
                            "cuEventRecord (behind scores)"));
    timed.waiting = true;
    return KV_OK;
}

void measured_choice::rule_out(const trial& work) {
    entry& ruled = entries_[work.entry];
    ruled.decided = true;
    ruled.waiting = false;
    ruled.way = 0;
}

measured_choice::verdicts measured_choice::count() const {
    verdicts made;
    for (const entry& each : entries_) {
        if (each.used == 0) continue;
        if (each.decided) {
            ++made.chosen[each.way];
        } else {
            ++made.open;
        }
    }
    return made;
}

}  // namespace kvrt::cuda
