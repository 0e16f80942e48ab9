// What the library promises to programs that are already compiled: exported symbols, the layout of
// every struct, the value of every constant, the names and categories of statuses. Each is compared
// with a golden file; `make golden` rewrites those. The tables are compared with the header's text
// too, so that a new struct, field, constant or function cannot be left out.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "abi/tables.h"
#include "kvrt/kvrt.h"

namespace {

using names = std::set<std::string>;

std::string read_text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    REQUIRE_MESSAGE(file.good(), "cannot read " << path);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

/// Compares with the golden file, or rewrites it when KVRT_UPDATE_GOLDEN is set.
void compare_with_golden(const std::string& name, const std::string& text) {
    const std::string path = std::string(KVRT_TEST_DIR) + "/abi/golden/" + name;
    if (std::getenv("KVRT_UPDATE_GOLDEN") != nullptr) {
        std::ofstream(path, std::ios::binary) << text;
    }
    INFO("a changed golden file is a changed promise; `make golden` rewrites " << name);
    CHECK(text == read_text(path));
}

/// kvrt.h without its comments.
std::string header_text() {
    const std::string text = read_text(std::string(KVRT_TEST_DIR) + "/../include/kvrt/kvrt.h");
    std::string plain;
    for (std::size_t at = 0; at < text.size();) {
        if (text.compare(at, 2, "/*") != 0) {
            plain += text[at++];
            continue;
        }
        at = text.find("*/", at) + 2;
    }
    return plain;
}

std::vector<std::smatch> matches(const std::string& text, const char* pattern) {
    const std::regex expression(pattern);
    return {std::sregex_iterator(text.begin(), text.end(), expression), std::sregex_iterator()};
}

/// The name that a declarator declares: the last word before any bracket, or what a function
/// pointer's first brackets hold.
std::string declared_name(const std::string& declarator) {
    std::smatch found;
    if (std::regex_search(declarator, found, std::regex(R"(\(\*(\w+)\))"))) return found[1];
    const std::string front = declarator.substr(0, declarator.find('['));
    REQUIRE(std::regex_search(front, found, std::regex(R"((\w+)\s*$)")));
    return found[1];
}

names header_functions() {
    names found;
    const std::string text = header_text();
    for (const std::smatch& match :
         matches(text, R"(KV_API (?:KV_MUST_CHECK )?(?:const )?\w+\s*\*?\s*(kv\w+)\()")) {
        found.insert(match[1]);
    }
    return found;
}

names exported_symbols() {
    const std::string command = std::string("nm -D --defined-only '") + KVRT_SHARED_LIBRARY + "'";
    const auto close = [](FILE* stream) { pclose(stream); };
    const std::unique_ptr<FILE, decltype(close)> pipe(popen(command.c_str(), "r"), close);
    REQUIRE(pipe != nullptr);
    names found;
    char line[512];
    while (std::fgets(line, sizeof line, pipe.get()) != nullptr) {
        char kind = 0;
        char name[256] = "";
        REQUIRE(std::sscanf(line, "%*x %c %255s", &kind, name) == 2);
        if (kind != 'A') found.insert(std::string(name).substr(0, std::string(name).find('@')));
    }
    return found;
}

TEST_CASE("exported symbols are those of the golden file and of the header") {
    std::ostringstream text;
    for (const std::string& name : exported_symbols()) text << name << '\n';
    compare_with_golden("symbols.txt", text.str());

    const names declared = header_functions();
    CHECK(declared.size() > 30);
    CHECK(exported_symbols() == declared);
}

TEST_CASE("struct layouts are those of the golden file") {
    std::ostringstream text;
    for (std::size_t s = 0; s < abi_struct_count; ++s) {
        const abi_struct& owner = abi_structs[s];
        text << owner.name << " size=" << owner.size << " alignment=" << owner.alignment << '\n';
        for (std::size_t f = 0; f < abi_field_count; ++f) {
            const abi_field& field = abi_fields[f];
            if (std::string(field.owner) != owner.name) continue;
            text << "  " << field.name << " offset=" << field.offset << " size=" << field.size
                 << '\n';
        }
    }
    compare_with_golden("layout.txt", text.str());
}

TEST_CASE("the layout table holds every struct and field of the header") {
    const std::string text = header_text();
    names in_header;
    std::size_t structs = 0;
    for (const std::smatch& match : matches(text, R"(typedef struct (\w+) \{([^}]*)\} (\w+);)")) {
        CHECK(match[1] == match[3]);
        ++structs;
        std::istringstream body(match[2]);
        std::string declaration;
        while (std::getline(body, declaration, ';')) {
            if (declaration.find_first_not_of(" \n") == std::string::npos) continue;
            const bool function = declaration.find('(') != std::string::npos;
            std::istringstream parts(declaration);
            std::string part = declaration;
            while (function || std::getline(parts, part, ',')) {
                in_header.insert(match[1].str() + "." + declared_name(part));
                if (function) break;
            }
        }
    }
    names in_table;
    for (std::size_t f = 0; f < abi_field_count; ++f) {
        in_table.insert(std::string(abi_fields[f].owner) + "." + abi_fields[f].name);
    }
    CHECK(structs == abi_struct_count);
    CHECK(structs > 20);
    CHECK(in_header == in_table);
}

TEST_CASE("structs have no holes, start with the header and need no more than 8 bytes alignment") {
    for (std::size_t s = 0; s < abi_struct_count; ++s) {
        const abi_struct& owner = abi_structs[s];
        CAPTURE(owner.name);
        CHECK(owner.alignment == 8);
        std::size_t end = 0;
        std::size_t fields = 0;
        for (std::size_t f = 0; f < abi_field_count; ++f) {
            const abi_field& field = abi_fields[f];
            if (std::string(field.owner) != owner.name) continue;
            CAPTURE(field.name);
            CHECK(field.offset == end);
            if (fields == 0) CHECK(std::string(field.name) == "struct_size");
            if (fields == 1) CHECK(std::string(field.name) == "flags");
            if (fields == 2) CHECK(std::string(field.name) == "next");
            end = field.offset + field.size;
            ++fields;
        }
        CHECK(fields >= 3);
        CHECK(end == owner.size);
    }
}

TEST_CASE("constants are those of the golden file, and all of the header") {
    std::ostringstream text;
    names in_table;
    for (std::size_t i = 0; i < abi_constant_count; ++i) {
        text << abi_constants[i].name << ' ' << abi_constants[i].value << '\n';
        in_table.insert(abi_constants[i].name);
    }
    compare_with_golden("constants.txt", text.str());

    const std::string header = header_text();
    names in_header;
    for (const std::smatch& match : matches(header, R"(\b(KV_[A-Z0-9_]+)\s*=)")) {
        in_header.insert(match[1]);
    }
    for (const std::smatch& match : matches(header, R"(#define (KVRT_VERSION\w*) )")) {
        in_header.insert(match[1]);
    }
    CHECK(in_header == in_table);
}

bool is_status(const abi_constant& constant) {
    const std::string name = constant.name;
    return name == "KV_OK" || constant.value < 0;
}

TEST_CASE("statuses have their names, values and categories") {
    std::ostringstream text;
    std::set<int64_t> values;
    for (std::size_t i = 0; i < abi_constant_count; ++i) {
        if (!is_status(abi_constants[i])) continue;
        const kv_status status = static_cast<kv_status>(abi_constants[i].value);
        CHECK(std::string(kv_status_name(status)) == abi_constants[i].name);
        CHECK(values.insert(abi_constants[i].value).second);
        text << abi_constants[i].name << ' ' << status << " category " << kv_status_category(status)
             << '\n';
    }
    compare_with_golden("statuses.txt", text.str());
}

TEST_CASE("unknown statuses have a name and their block's category") {
    for (const kv_status unknown : {1, 99, 2147483647, -1, -99, -102, -250, -700, -2147483647}) {
        CHECK(std::string(kv_status_name(unknown)) == "KV_UNKNOWN");
    }
    CHECK(kv_status_category(1) == KV_CATEGORY_OK);
    CHECK(kv_status_category(2147483647) == KV_CATEGORY_OK);
    CHECK(kv_status_category(-150) == KV_CATEGORY_ARGUMENT);
    CHECK(kv_status_category(-299) == KV_CATEGORY_STATE);
    CHECK(kv_status_category(-399) == KV_CATEGORY_CAPACITY);
    CHECK(kv_status_category(-450) == KV_CATEGORY_DEVICE);
    CHECK(kv_status_category(-599) == KV_CATEGORY_IO);
    CHECK(kv_status_category(-601) == KV_CATEGORY_INTERNAL);
    // No category of their own: as bad as it can be.
    CHECK(kv_status_category(-1) == KV_CATEGORY_INTERNAL);
    CHECK(kv_status_category(-100000) == KV_CATEGORY_INTERNAL);
    CHECK(kv_status_category(-2147483647 - 1) == KV_CATEGORY_INTERNAL);
}

TEST_CASE("the loaded library is of the header's version") {
    CHECK(kvrt_version() == KVRT_VERSION);
}

}  // namespace
