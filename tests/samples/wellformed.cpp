#include "wellformed.hpp"

#include <algorithm>
#include <cctype>
#include <set>
#include <string>
#include <vector>

namespace wellformed {

namespace {

// Reads from the front; every function says whether what it is to read stands there.
class reader {
  public:
    explicit reader(std::string_view text) : left_(text) {}

    bool at_end() const { return left_.empty(); }

    bool take(std::string_view word) {
        const bool there = left_.starts_with(word);
        left_.remove_prefix(there ? word.size() : 0);
        return there;
    }

    template <class test_type>
    std::string_view take_while(test_type test) {
        const auto end = std::find_if_not(left_.begin(), left_.end(), test);
        const std::string_view taken =
            left_.substr(0, static_cast<std::size_t>(end - left_.begin()));
        left_.remove_prefix(taken.size());
        return taken;
    }

    void skip_space() {
        take_while([](char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; });
    }

    bool json_value() {
        skip_space();
        const bool read = take("{")    ? json_list("}", true)
                          : take("[")  ? json_list("]", false)
                          : take("\"") ? json_string()
                                       : take("null") || take("true") || take("false") || number();
        skip_space();
        return read;
    }

    bool xml_element() {
        if (!take("<")) {
            return false;
        }
        const std::string name(xml_name());
        std::set<std::string_view> attributes;
        while (!name.empty()) {
            skip_space();
            if (take("/>")) {
                return true;
            }
            if (take(">")) {
                return xml_content(name);
            }
            const std::string_view attribute = xml_name();
            if (attribute.empty() || !attributes.insert(attribute).second || !take("=\"") ||
                !xml_text('"') || !take("\"")) {
                return false;
            }
        }
        return false;
    }

  private:
    bool json_list(std::string_view end, bool named) {
        skip_space();
        if (take(end)) {
            return true;
        }
        do {
            skip_space();
            if (named && !(take("\"") && json_string() && (skip_space(), take(":")))) {
                return false;
            }
            if (!json_value()) {
                return false;
            }
        } while (take(","));
        return take(end);
    }

    bool json_string() {
        while (!at_end() && !take("\"")) {
            if (static_cast<unsigned char>(left_[0]) < 0x20) {
                return false;
            }
            if (take("\\u")) {
                const auto digits = left_.substr(0, 4);
                if (digits.size() < 4 || !std::all_of(digits.begin(), digits.end(), is_hex)) {
                    return false;
                }
                left_.remove_prefix(4);
            } else if (take("\\")) {
                if (at_end() || std::string_view("\"\\/bfnrt").find(left_[0]) == left_.npos) {
                    return false;
                }
                left_.remove_prefix(1);
            } else {
                left_.remove_prefix(1);
            }
            if (at_end()) {
                return false;
            }
        }
        return true;
    }

    bool number() {
        take("-");
        if (!take("0") && take_while(is_digit).empty()) {
            return false;
        }
        if (take(".") && take_while(is_digit).empty()) {
            return false;
        }
        if (take("e") || take("E")) {
            static_cast<void>(take("+") || take("-"));
            return !take_while(is_digit).empty();
        }
        return true;
    }

    bool xml_content(const std::string& name) {
        while (xml_text('<')) {
            if (take("</")) {
                return xml_name() == name && take(">");
            }
            if (!xml_element()) {
                return false;
            }
        }
        return false;
    }

    std::string_view xml_name() {
        return take_while([](char c) {
            return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                   c == ':';
        });
    }

    // Up to `end`, which must come.
    bool xml_text(char end) {
        while (!at_end() && left_[0] != end) {
            const char character = left_[0];
            const bool control = static_cast<unsigned char>(character) < 0x20 &&
                                 character != '\n' && character != '\t';
            if (character == '<' || control) {
                return false;
            }
            if (character == '&' && !(take("&amp;") || take("&lt;") || take("&gt;") ||
                                      take("&quot;") || take("&apos;"))) {
                return false;
            }
            if (character != '&') {
                left_.remove_prefix(1);
            }
        }
        return !at_end();
    }

    static bool is_digit(char c) { return c >= '0' && c <= '9'; }
    static bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

    std::string_view left_;
};

}  // namespace

bool is_json(std::string_view text) {
    reader whole(text);
    return whole.json_value() && whole.at_end();
}

bool is_xml(std::string_view text) {
    reader whole(text);
    if (!whole.xml_element()) {
        return false;
    }
    whole.skip_space();
    return whole.at_end();
}

}  // namespace wellformed
