#!/usr/bin/env python3
"""Writes unicode_ranges.cpp: which code points are letters and which are numbers.

    python3 make_unicode_ranges.py > unicode_ranges.cpp
"""
import sys
import unicodedata


def ranges_of(category):
    ranges = []
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] == category:
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return ranges


def write(name, category):
    ranges = ranges_of(category)
    print(f"const std::array<code_point_range, {len(ranges)}> {name} = {{{{")
    line = "   "
    for first, last in ranges:
        item = f" {{{first:#x}, {last:#x}}},"
        if len(line) + len(item) > 100:
            print(line)
            line = "   "
        line += item
    print(line)
    print("}};")


print(f"// Written by make_unicode_ranges.py from Unicode {unicodedata.unidata_version}.")
print("// clang-format off")
print('#include "unicode.hpp"')
print()
print("#include <algorithm>")
print("#include <array>")
print()
print("namespace generate {")
print()
print("namespace {")
print()
print("struct code_point_range {")
print("    char32_t first;")
print("    char32_t last;")
print("};")
print()
write("letters", "L")
print()
write("numbers", "N")
print()
sys.stdout.write("""template <class table_type>
bool contains(const table_type &table, char32_t code_point) {
    const auto after = std::upper_bound(
        table.begin(), table.end(), code_point,
        [](char32_t value, const code_point_range &range) { return value < range.first; });
    return after != table.begin() && code_point <= (after - 1)->last;
}

}  // namespace

bool is_letter(char32_t code_point) { return contains(letters, code_point); }

bool is_number(char32_t code_point) { return contains(numbers, code_point); }

}  // namespace generate
""")
