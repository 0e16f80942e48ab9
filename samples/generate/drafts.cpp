#include "drafts.hpp"

#include <algorithm>

namespace generate {

namespace {

constexpr std::size_t longest_match = 3;
constexpr std::size_t shortest_match = 2;

}  // namespace

std::vector<token_id> look_up_drafts(std::span<const token_id> text, std::size_t most) {
    for (std::size_t length = longest_match; length >= shortest_match; --length) {
        if (length >= text.size()) {
            continue;
        }
        const auto newest = text.last(length);
        const auto earlier = text.first(text.size() - 1);  // so that something follows the match
        const auto match =
            std::find_end(earlier.begin(), earlier.end(), newest.begin(), newest.end());
        if (match != earlier.end()) {
            const auto behind = static_cast<std::size_t>(match - earlier.begin()) + length;
            const auto drafts = text.subspan(behind, std::min(most, text.size() - behind));
            return {drafts.begin(), drafts.end()};
        }
    }
    return {};
}

}  // namespace generate
