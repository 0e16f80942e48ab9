// Errors as values: an outcome holds either a result or a message that says what was wrong and what
// would be right. Nothing in this sample throws on purpose.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace generate {

struct error {
    std::string message;
};

// The result of a call that has nothing to return but success.
struct nothing {};

template <class value_type>
class [[nodiscard]] outcome {
  public:
    outcome(value_type value) : content_(std::in_place_index<0>, std::move(value)) {}
    outcome(error failure) : content_(std::in_place_index<1>, std::move(failure)) {}

    explicit operator bool() const { return content_.index() == 0; }

    // Only after the outcome was found true.
    value_type& operator*() { return *std::get_if<0>(&content_); }
    const value_type& operator*() const { return *std::get_if<0>(&content_); }
    value_type* operator->() { return std::get_if<0>(&content_); }
    const value_type* operator->() const { return std::get_if<0>(&content_); }

    // Only after the outcome was found false.
    const std::string& message() const { return std::get_if<1>(&content_)->message; }
    error failure() const { return *std::get_if<1>(&content_); }

  private:
    std::variant<value_type, error> content_;
};

}  // namespace generate
