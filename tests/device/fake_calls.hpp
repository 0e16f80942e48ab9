// How each call enters the fake driver, for fake_*.cpp.
#pragma once

#include "fake_driver.hpp"

namespace kvrt::cuda {

struct fake_calls {
    static fake_driver* active;  ///< a table has no place for an object

    /// A call that any thread may make, whatever its context.
    template <class callable>
    static driver_result any(const char* symbol, const callable& body) {
        return enter(symbol, false, false, body);
    }
    template <class callable>
    static driver_result in_context(const char* symbol, const callable& body) {
        return enter(symbol, true, false, body);
    }
    /// One that may wait for, or change, more than the stream: not while anybody captures.
    template <class callable>
    static driver_result outside_capture(const char* symbol, const callable& body) {
        return enter(symbol, true, true, body);
    }

  private:
    template <class callable>
    static driver_result enter(const char* symbol, bool needs_context, bool unsafe_in_capture,
                               const callable& body) {
        fake_driver& self = *active;
        const std::lock_guard<std::recursive_mutex> guard(self.lock_);
        const driver_result entered = self.enter(symbol, needs_context, unsafe_in_capture);
        return entered != success ? entered : body(self);
    }
};

}  // namespace kvrt::cuda
