// What the library promises to programs that are already compiled: exported symbols, the layout of
// every struct, the value of every constant, the names and categories of statuses. Each is compared
// with a golden file; `make golden` rewrites those. The tables are compared with the header's text
// too, so that a new struct, field, constant or function cannot be left out.
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
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

std::string header_text() {
    const std::string folder = std::string(KVRT_TEST_DIR) + "/../include/kvrt/";
    return read_text(folder + "kvrt.h") + read_text(folder + "kv_cuda.h");
}

/// The headers as words and signs, without comments and directives.
std::vector<std::string> header_tokens() {
    const std::string text = header_text();
    const auto in_word = [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
    };
    std::vector<std::string> tokens;
    for (std::size_t at = 0; at < text.size();) {
        if (text.compare(at, 2, "/*") == 0) {
            at = text.find("*/", at) + 2;
        } else if (text[at] == '#') {
            at = text.find('\n', at);
        } else if (in_word(text[at])) {
            std::size_t end = at;
            while (in_word(text[end])) ++end;
            tokens.push_back(text.substr(at, end - at));
            at = end;
        } else {
            if (std::isspace(static_cast<unsigned char>(text[at])) == 0) {
                tokens.push_back(text.substr(at, 1));
            }
            ++at;
        }
    }
    return tokens;
}

using token = std::vector<std::string>::const_iterator;

/// The names that a declaration [first, last) of one or more fields declares.
names declared_names(token first, token last) {
    names found;
    const token bracket = std::find(first, last, "(");
    if (bracket != last) {  // a function's pointer: (*name)(...)
        REQUIRE(*(bracket + 1) == "*");
        return {*(bracket + 2)};
    }
    for (token at = first; at != last; ++at) {
        const bool ends = at + 1 == last || *(at + 1) == "," || *(at + 1) == "[";
        if (ends && *at != "]") found.insert(*at);
        if (*at == "[") at = std::find(at, last, "]");
    }
    return found;
}

/// "struct.field" for every field of every struct; counts the structs.
names header_fields(std::size_t& structs) {
    const std::vector<std::string> tokens = header_tokens();
    names found;
    structs = 0;
    for (token at = tokens.begin(); at + 4 < tokens.end(); ++at) {
        if (*at != "typedef" || *(at + 1) != "struct" || *(at + 3) != "{") continue;
        ++structs;
        const std::string name = *(at + 2);
        token field = at + 4;
        const token end = std::find(field, tokens.end(), "}");
        CHECK(*(end + 1) == name);
        while (field != end) {
            const token semicolon = std::find(field, end, ";");
            for (const std::string& one : declared_names(field, semicolon)) {
                found.insert(name + "." + one);
            }
            field = semicolon + 1;
        }
    }
    return found;
}

names header_functions() {
    const std::vector<std::string> tokens = header_tokens();
    names found;
    for (token at = tokens.begin(); at != tokens.end(); ++at) {
        if (*at == "KV_API") found.insert(*(std::find(at, tokens.end(), "(") - 1));
    }
    return found;
}

names header_constants() {
    const std::vector<std::string> tokens = header_tokens();
    names found;
    for (token at = tokens.begin(); at + 1 < tokens.end(); ++at) {
        if (at->compare(0, 3, "KV_") == 0 && *(at + 1) == "=") found.insert(*at);
    }
    std::istringstream lines(header_text());
    std::string directive, name;
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        words >> directive >> name;
        if (directive == "#define" && name.compare(0, 12, "KVRT_VERSION") == 0) found.insert(name);
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

/// Of kv_cuda.h, which has golden files of its own: bindings hold all of the others.
bool is_of_cuda(const std::string& name) { return name.compare(0, 8, "kv_cuda_") == 0; }

TEST_CASE("exported symbols are those of the golden files and of the headers") {
    std::ostringstream text, of_cuda;
    for (const std::string& name : exported_symbols()) {
        (is_of_cuda(name) ? of_cuda : text) << name << '\n';
    }
    compare_with_golden("symbols.txt", text.str());
    compare_with_golden("cuda_symbols.txt", of_cuda.str());

    const names declared = header_functions();
    CHECK(declared.size() > 30);
    CHECK(exported_symbols() == declared);
}

TEST_CASE("struct layouts are those of the golden files") {
    std::ostringstream general, of_cuda;
    for (std::size_t s = 0; s < abi_struct_count; ++s) {
        const abi_struct& owner = abi_structs[s];
        std::ostringstream& text = is_of_cuda(owner.name) ? of_cuda : general;
        text << owner.name << " size=" << owner.size << " alignment=" << owner.alignment << '\n';
        for (std::size_t f = 0; f < abi_field_count; ++f) {
            const abi_field& field = abi_fields[f];
            if (std::string(field.owner) != owner.name) continue;
            text << "  " << field.name << " offset=" << field.offset << " size=" << field.size
                 << '\n';
        }
    }
    compare_with_golden("layout.txt", general.str());
    compare_with_golden("cuda_layout.txt", of_cuda.str());
}

TEST_CASE("the layout table holds every struct and field of the header") {
    std::size_t structs = 0;
    const names in_header = header_fields(structs);
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

    const names in_header = header_constants();
    CHECK(in_header.size() > 50);
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
