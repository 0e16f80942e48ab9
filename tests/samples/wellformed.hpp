// Whether a text is JSON, or XML of the plain kind that an SVG file is: small readers of their own,
// that share nothing with what wrote it.
#pragma once

#include <string_view>

namespace wellformed {

bool is_json(std::string_view text);

// Elements, attributes in double quotes, text, and the five named entities; no declaration, comment
// or CDATA. One root.
bool is_xml(std::string_view text);

}  // namespace wellformed
