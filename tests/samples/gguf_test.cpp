// The GGUF parser: what it reads, and that no file can make it read outside its bytes or spend
// memory out of proportion. Run under the address sanitizer, each case is a memory test too.
#include "gguf.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <limits>
#include <random>

#include "gguf_builder.hpp"

using generate::gguf_file;

namespace {

// The message of the error that parsing must end with.
std::string failure(const gguf_builder& built) {
    auto parsed = gguf_file::parse(built.bytes());
    REQUIRE_FALSE(parsed);
    return parsed.message();
}

bool mentions(const std::string& message, std::string_view part) {
    return message.find(part) != std::string::npos;
}

gguf_builder small_file() {
    gguf_builder built;
    built.header(2, 5)
        .key_text("general.architecture", "llama")
        .key_u32("answer", 42)
        .key_f32("half", 0.5f)
        .key_texts("words", {"one", "", "three"})
        .key_i32s("types", {-1, 2});
    built.tensor("first", {4, 2}, 0, 0).tensor("second", {32}, 8, 32).data(32 + 34, 1);
    return built;
}

}  // namespace

TEST_CASE("gguf: metadata and tensors are read") {
    const gguf_builder built = small_file();
    auto file = gguf_file::parse(built.bytes());
    REQUIRE(file);
    CHECK(*file->integer("answer", 0, 100) == 42);
    CHECK(*file->number("half") == 0.5);
    CHECK(*file->text("general.architecture") == "llama");
    CHECK(*file->texts("words") == std::vector<std::string>{"one", "", "three"});
    CHECK(std::get<std::vector<std::int64_t>>(*file->find("types")) ==
          std::vector<std::int64_t>{-1, 2});
    const auto* second = file->find_tensor("second");
    REQUIRE(second != nullptr);
    CHECK(second->layout->type == generate::weight_type::q8_0);
    CHECK(second->bytes.size() == 34);
    CHECK(second->bytes.data() + 34 == built.bytes().data() + built.bytes().size());
    CHECK(file->find_tensor("third") == nullptr);
}

TEST_CASE("gguf: typed access says what is wrong") {
    const gguf_builder built = small_file();
    auto file = gguf_file::parse(built.bytes());
    REQUIRE(file);
    CHECK(mentions(file->integer("absent", 0, 1).message(), "'absent' is missing"));
    CHECK(*file->integer("absent", 0, 9, 7) == 7);
    CHECK(mentions(file->integer("answer", 0, 41).message(), "42, allowed are 0 to 41"));
    CHECK(mentions(file->integer("half", 0, 1).message(), "not an integer"));
    CHECK(mentions(file->text("answer").message(), "not a string"));
    CHECK(mentions(file->texts("types").message(), "not an array of strings"));
}

TEST_CASE("gguf: every truncation is an error") {
    const gguf_builder built = small_file();
    for (std::size_t size = 0; size < built.content.size(); ++size) {
        // A copy of the exact size, so that a read past the end is seen by the sanitizer.
        const std::vector<std::byte> cut(built.bytes().begin(),
                                         built.bytes().begin() + static_cast<std::ptrdiff_t>(size));
        CAPTURE(size);
        CHECK_FALSE(gguf_file::parse(cut));
    }
}

TEST_CASE("gguf: flipped bytes never crash") {
    const gguf_builder built = small_file();
    std::mt19937 random(11);
    int readable = 0;
    for (int round = 0; round < 20000; ++round) {
        std::vector<std::byte> damaged(built.bytes().begin(), built.bytes().end());
        for (int i = 0; i < 1 + round % 4; ++i) {
            damaged[random() % damaged.size()] = static_cast<std::byte>(random());
        }
        auto parsed = gguf_file::parse(damaged);
        if (parsed) {
            ++readable;
            for (const auto& [name, tensor] : parsed->tensors()) {
                const auto* end = damaged.data() + damaged.size();
                REQUIRE(tensor.bytes.data() >= damaged.data());
                REQUIRE(tensor.bytes.data() + tensor.bytes.size() <= end);
            }
        }
    }
    CHECK(readable > 0);
    CHECK(readable < 20000);
}

TEST_CASE("gguf: headers") {
    gguf_builder other;
    other.content = "GGML and something behind it ....";
    CHECK(mentions(failure(other), "does not begin with the letters GGUF"));
    CHECK(mentions(failure(gguf_builder().header(0, 0, 1)), "version 1"));
    CHECK(mentions(failure(gguf_builder().header(0, 0, 4)), "version 4"));
    CHECK(mentions(failure(gguf_builder().header(1ull << 60, 0)), "at most 65536"));
    CHECK(mentions(failure(gguf_builder().header(0, ~0ull)), "at most 65536"));
    CHECK(mentions(failure(gguf_builder().header(0, 1)), "the file ends inside"));
    CHECK(gguf_file::parse(gguf_builder().header(0, 0).bytes()));
}

TEST_CASE("gguf: strings and arrays longer than the file") {
    gguf_builder long_key;
    long_key.header(0, 1).raw(~std::uint64_t{0});
    CHECK(mentions(failure(long_key), "at most 1024"));

    gguf_builder long_value;
    long_value.header(0, 1).text("key").raw(std::uint32_t{8}).raw(std::uint64_t{1} << 62);
    CHECK(mentions(failure(long_value), "is 4611686018427387904 bytes long"));

    for (const std::uint32_t kind : {0u, 5u, 7u, 8u, 12u}) {
        gguf_builder long_array;
        long_array.header(0, 1).text("key").raw(std::uint32_t{9}).raw(kind);
        long_array.raw(~std::uint64_t{0}).raw(std::uint64_t{0});
        CHECK(mentions(failure(long_array), "more than the file can hold"));
    }

    gguf_builder nested;
    nested.header(0, 1).text("key").raw(std::uint32_t{9}).raw(std::uint32_t{9});
    nested.raw(std::uint64_t{1}).raw(std::uint64_t{0});
    CHECK(mentions(failure(nested), "type 9, which is not supported"));
}

TEST_CASE("gguf: values outside their type") {
    gguf_builder unknown;
    unknown.header(0, 1).text("key").raw(std::uint32_t{13}).raw(std::uint64_t{0});
    CHECK(mentions(failure(unknown), "unknown type 13"));

    gguf_builder boolean;
    boolean.header(0, 1).text("key").raw(std::uint32_t{7}).raw(std::uint8_t{2});
    CHECK(mentions(failure(boolean), "a boolean is 2"));

    gguf_builder large;
    large.header(0, 1).text("key").raw(std::uint32_t{10}).raw(~std::uint64_t{0});
    CHECK(mentions(failure(large), "63 bits"));

    gguf_builder twice;
    twice.header(0, 2).key_u32("key", 1).key_u32("key", 2);
    CHECK(mentions(failure(twice), "there twice"));

    for (const std::uint32_t alignment : {0u, 3u, 48u, 1u << 21}) {
        gguf_builder odd;
        odd.header(0, 1).key_u32("general.alignment", alignment);
        CHECK(mentions(failure(odd), "general.alignment"));
    }
}

TEST_CASE("gguf: tensors that cannot be") {
    const auto with_tensor = [](const std::vector<std::uint64_t>& shape, std::uint32_t type,
                                std::uint64_t offset) {
        gguf_builder built;
        return built.header(1, 0).tensor("t", shape, type, offset).data(64);
    };
    CHECK(gguf_file::parse(with_tensor({16}, 0, 0).bytes()));
    CHECK(gguf_file::parse(with_tensor({8}, 0, 32).bytes()));
    CHECK(mentions(failure(with_tensor({17}, 0, 0)), "outside the file"));
    CHECK(mentions(failure(with_tensor({9}, 0, 32)), "outside the file"));
    CHECK(mentions(failure(with_tensor({1}, 0, 64)), "outside the file"));
    CHECK(mentions(failure(with_tensor({1}, 0, ~0ull - 31)), "outside the file"));
    CHECK(mentions(failure(with_tensor({1}, 0, 4)), "not aligned"));
    CHECK(mentions(failure(with_tensor({0}, 0, 0)), "impossible shape"));
    CHECK(mentions(failure(with_tensor({~0ull}, 0, 0)), "impossible shape"));
    CHECK(mentions(failure(with_tensor({1u << 31, 1u << 31, 1u << 31}, 0, 0)), "impossible shape"));
    CHECK(mentions(failure(with_tensor({1ull << 40}, 0, 0)), "outside the file"));
    CHECK(mentions(failure(with_tensor({}, 0, 0)), "0 dimensions"));
    CHECK(mentions(failure(with_tensor({1, 1, 1, 1, 1}, 0, 0)), "5 dimensions"));
    CHECK(mentions(failure(with_tensor({16}, 10, 0)), "type 10, readable are F32"));
    CHECK(mentions(failure(with_tensor({16}, ~0u, 0)), "readable are F32"));
    CHECK(mentions(failure(with_tensor({16}, 8, 0)), "needs a multiple of 32"));

    gguf_builder twice;
    twice.header(2, 0).tensor("t", {1}, 0, 0).tensor("t", {1}, 0, 0).data(64);
    CHECK(mentions(failure(twice), "there twice"));
}

TEST_CASE("gguf: files that are not there or not files") {
    CHECK(mentions(gguf_file::open("/nowhere/at/all.gguf").message(), "No such file"));
    const std::string folder = std::filesystem::temp_directory_path().string();
    CHECK(mentions(gguf_file::open(folder).message(), "not a file with content"));
}
