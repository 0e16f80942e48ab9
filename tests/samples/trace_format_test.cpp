// The trace format: written and read by the table of docs/trace.md, and every file refused that
// does not keep to it.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <string_view>

#include "dequantize.hpp"
#include "program.hpp"
#include "trace/checksum.hpp"
#include "trace/half.hpp"
#include "trace/output_file.hpp"
#include "trace/trace.hpp"
#include "trace_builder.hpp"

namespace {

using bytes = std::vector<std::byte>;

std::uint64_t fnv(std::string_view text) {
    trace::checksum sum;
    sum.add(std::as_bytes(std::span(text)));
    return sum.value();
}

// The document's table once more, as plain as it stands there.
class plain_writer {
  public:
    plain_writer& text(std::string_view letters) {
        for (const char letter : letters) {
            content.push_back(static_cast<std::byte>(letter));
        }
        return *this;
    }
    plain_writer& number(std::uint64_t value, int size) {
        for (int i = 0; i < size; ++i) {
            content.push_back(static_cast<std::byte>(value >> (8 * i) & 0xff));
        }
        return *this;
    }
    plain_writer& u32(std::uint32_t value) { return number(value, 4); }

    bytes content;
};

// Why a file is refused; empty if it is taken.
std::string refusal(const bytes& file) {
    try {
        trace::decode(file);
    } catch (const trace::error& refused) {
        return refused.what();
    }
    return "";
}

constexpr std::uint32_t dim = 32;

// One layer, one request, a turn of two rows of which one is accepted and has outputs.
bytes plain_file() {
    plain_writer to;
    to.text("KVTRACE1").u32(1).u32(2).u32(1).u32(dim);             // layers, heads, head_dim
    to.u32(2).u32(1).u32(4);                                       // format, rotation
    to.u32(1).u32(0).u32(8).u32(28).u32(9).u32(4).u32(5).u32(64);  // the policy
    to.u32(1).number(0x0123456789abcdef, 8);                       // requests, seed
    to.number(std::bit_cast<std::uint64_t>(1.0), 8);               // inverse_frequencies
    to.number(std::bit_cast<std::uint64_t>(0.25), 8);
    to.u32(17);                                 // layer_numbers
    to.u32(12).u32(1).u32(3).u32(77).u32(66);   // a request
    to.u32(2).u32(1).u32(1).u32(500).u32(501);  // a turn
    std::uint32_t half = 0x3c00;
    for (std::uint32_t i = 0; i < 2 * (2 + 1 + 1) * dim; ++i) {
        to.number(half++, 2);  // queries, keys, values
    }
    for (std::uint32_t i = 0; i < 2 * dim; ++i) {
        to.number(std::bit_cast<std::uint32_t>(static_cast<float>(i) * 0.5f), 4);  // outputs
    }
    to.number(0, 8);
    seal(to.content);
    return to.content;
}

// The plain file with a number of four bytes replaced.
bytes with_u32(std::size_t offset, std::uint32_t value) {
    bytes file = plain_file();
    std::memcpy(file.data() + offset, &value, sizeof(value));
    seal(file);
    return file;
}

}  // namespace

TEST_CASE("trace: the checksum is FNV-1a") {
    // The published values of these texts.
    CHECK(fnv("") == 0xcbf29ce484222325u);
    CHECK(fnv("a") == 0xaf63dc4c8601ec8cu);
    CHECK(fnv("foobar") == 0x85944171f73967e8u);
}

TEST_CASE("trace: halves are the nearest, ties go to the even one") {
    for (std::uint32_t half = 0; half < 0x7c00; ++half) {
        const auto bits = static_cast<std::uint16_t>(half);
        const float value = generate::half_to_float(bits);
        const float next = half == 0x7bff
                               ? 65536.0f
                               : generate::half_to_float(static_cast<std::uint16_t>(half + 1));
        const float middle = (value + next) / 2;  // exact in f32
        const std::uint32_t even = half % 2 == 0 ? half : half + 1;
        REQUIRE(trace::half_from_float(value) == half);
        REQUIRE(trace::half_from_float(-value) == (half | 0x8000u));
        REQUIRE(trace::half_from_float(middle) == even);
        REQUIRE(trace::half_from_float(std::nextafter(middle, 0.0f)) == half);
        REQUIRE(trace::half_from_float(std::nextafter(middle, 1e6f)) == half + 1);
    }
    CHECK(trace::half_from_float(INFINITY) == 0x7c00);
    CHECK(trace::half_from_float(-1e30f) == 0xfc00);
    CHECK(std::isnan(generate::half_to_float(trace::half_from_float(NAN))));
}

TEST_CASE("trace: a file by the document's table is read field by field, and written the same") {
    const bytes file = plain_file();
    const trace::recording read = trace::decode(file);
    CHECK(read.query_heads == 2);
    CHECK(read.kv_heads == 1);
    CHECK(read.head_dim == dim);
    CHECK(read.format == 2);
    CHECK(read.rope_style == 1);
    CHECK(read.scorer == 1);
    CHECK(read.selection == 0);
    CHECK(read.policy_flags == 8);
    CHECK(read.budget == 28);
    CHECK(read.every == 9);
    CHECK(read.sinks == 4);
    CHECK(read.recent == 5);
    CHECK(read.offset_max == 64);
    CHECK(read.seed == 0x0123456789abcdef);
    CHECK(read.inverse_frequencies == std::vector<double>{1.0, 0.25});
    CHECK(read.layer_numbers == std::vector<std::uint32_t>{17});
    REQUIRE(read.requests.size() == 1);
    const trace::request& request = read.requests[0];
    CHECK(request.prompt_tokens == 12);
    CHECK(request.rounds == 3);
    CHECK(request.seen == 77);
    CHECK(request.retained == std::vector<std::uint32_t>{66});
    REQUIRE(request.turns.size() == 1);
    const trace::turn& turn = request.turns[0];
    CHECK(turn.token_ids == std::vector<std::uint32_t>{500, 501});
    CHECK(turn.accepted == 1);
    CHECK(turn.output_rows == 1);
    REQUIRE(turn.layers.size() == 1);
    const trace::layer_rows& rows = turn.layers[0];
    CHECK(rows.queries.size() == 4 * dim);
    CHECK(rows.keys.size() == 2 * dim);
    CHECK(rows.values.size() == 2 * dim);
    CHECK(rows.queries.front() == 0x3c00);
    CHECK(rows.keys.front() == 0x3c00 + 4 * dim);
    CHECK(rows.values.back() == 0x3c00 + 8 * dim - 1);
    CHECK(rows.outputs.size() == 2 * dim);
    CHECK(rows.outputs.back() == (2 * dim - 1) * 0.5f);
    CHECK(trace::encode(read) == file);
}

TEST_CASE("trace: several requests, turns and layers survive the way to a file and back") {
    trace_shape shape;
    shape.requests = {{{9, 9}, {1, 1}, {4, 2}}, {{3, 3}, {2, 0}}};
    const trace::recording made = make_trace(shape);
    const bytes file = trace::encode(made);
    const scratch_folder scratch;
    trace::output_file(scratch.path("t.trace")).commit(file);
    const trace::recording read = trace::read_trace(scratch.path("t.trace"));
    CHECK(trace::encode(read) == file);
    CHECK(read.requests[1].turns[1].layers[1].values == made.requests[1].turns[1].layers[1].values);
    CHECK(read.requests[0].turns[2].layers[0].outputs ==
          made.requests[0].turns[2].layers[0].outputs);
}

TEST_CASE("trace: every file that ends too early is refused") {
    const bytes file = plain_file();
    for (std::size_t size = 0; size < file.size(); ++size) {
        CAPTURE(size);
        bytes cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
        CHECK_FALSE(refusal(cut).empty());  // by its checksum, at the latest
        if (size >= 16) {
            seal(cut);  // a file whose checksum is right: the reader must notice by itself
            CHECK(refusal(cut).find("the file ends within") == 0);
        }
    }
}

TEST_CASE("trace: a wrong magic, checksum or end is refused with what is wrong") {
    bytes file = plain_file();
    file[7] = std::byte{'2'};
    seal(file);
    CHECK(refusal(file) == "this is not a trace: it does not begin with KVTRACE1");
    CHECK(refusal({}) == "this is not a trace: it does not begin with KVTRACE1");
    file = plain_file();
    for (const std::size_t offset : {std::size_t{8}, file.size() / 2, file.size() - 1}) {
        bytes damaged = file;
        damaged[offset] ^= std::byte{1};
        CHECK(refusal(damaged) == "the checksum does not match: the file is damaged or cut short");
    }
    file.insert(file.end(), 3, std::byte{0});
    seal(file);
    CHECK(refusal(file) == "3 bytes lie behind the last request");
}

TEST_CASE("trace: every count is checked against its bounds") {
    struct wrong {
        std::size_t offset;
        std::uint32_t value;
        const char* message;
    };
    constexpr std::size_t request = 100;  // behind the header, two frequencies and one layer number
    constexpr std::size_t turn = request + 20;
    for (const wrong& one : {
             wrong{8, 0, "layers is 0, it must be 1 to 64"},
             wrong{8, 65, "layers is 65, it must be 1 to 64"},
             wrong{12, 0, "query_heads is 0, it must be 1 to 1024"},
             wrong{12, 1025, "query_heads is 1025, it must be 1 to 1024"},
             wrong{16, 0, "kv_heads is 0, it must be 1 to 2"},
             wrong{16, 3, "kv_heads is 3, it must be 1 to 2"},
             wrong{20, 24, "head_dim is 24, it must be 32 to 256"},
             wrong{20, 36, "head_dim is 36, it must be a multiple of 8"},
             wrong{20, 264, "head_dim is 264, it must be 32 to 256"},
             wrong{28, 0, "rope_dimensions is 4, it must be even, and 0 exactly when"},
             wrong{32, 3, "rope_dimensions is 3, it must be even, and 0 exactly when"},
             wrong{32, 0, "rope_dimensions is 0, it must be even, and 0 exactly when"},
             wrong{32, 34, "rope_dimensions is 34, it must be 0 to 32"},
             wrong{68, 0, "requests is 0, it must be 1 to 4096"},
             wrong{68, 4097, "requests is 4097, it must be 1 to 4096"},
             wrong{request + 4, 0, "turns is 0, it must be 1 to 65536"},
             wrong{request + 4, 65537, "turns is 65537, it must be 1 to 65536"},
             wrong{turn, 0, "rows is 0, it must be 1 to 8192"},
             wrong{turn, 8193, "rows is 8193, it must be 1 to 8192"},
             wrong{turn + 4, 3, "accepted is 3, it must be 0 to 2"},
             wrong{turn + 8, 3, "output_rows is 3, it must be 0 to 2"},
         }) {
        CAPTURE(std::string(one.message));
        CHECK(refusal(with_u32(one.offset, one.value)).find(one.message) == 0);
    }
    // Counts that are allowed but not there: the largest of each, in a file of some hundred bytes.
    for (const wrong& one : {
             wrong{12, 1024, "the file ends within queries: 131072 bytes"},
             wrong{20, 256, "the file ends within queries"},
             wrong{68, 4096, "the file ends within prompt_tokens"},
             wrong{request + 4, 65536, "the file ends within rows"},
             wrong{turn, 8192, "the file ends within token_ids: 32768 bytes are needed"},
             wrong{turn + 8, 2, "the file ends within outputs: 512 bytes are needed, 256 are left"},
         }) {
        CAPTURE(std::string(one.message));
        CHECK(refusal(with_u32(one.offset, one.value)).find(one.message) == 0);
    }
}

TEST_CASE("trace: whatever bytes come, a file is refused or is exactly what it says") {
    const bytes file = plain_file();
    std::mt19937 generator(7);
    int taken = 0;
    for (int round = 0; round < 20000; ++round) {
        bytes changed = file;
        for (std::uint32_t change = generator() % 3 + 1; change > 0; --change) {
            // Mostly in the first bytes, where the counts are.
            const std::size_t end = generator() % 4 == 0 ? file.size() - 8 : 160;
            changed[8 + generator() % (end - 8)] = static_cast<std::byte>(generator() & 0xff);
        }
        seal(changed);
        try {
            const trace::recording read = trace::decode(changed);
            REQUIRE(trace::encode(read) == changed);
            ++taken;
        } catch (const trace::error&) {
        }
    }
    CHECK(taken > 1000);
    CHECK(taken < 19000);
}

TEST_CASE("trace: what a reader would refuse is not written") {
    trace_shape shape;
    shape.requests = {{{2, 1}}};
    const trace::recording good = make_trace(shape);
    const auto failure = [](const trace::recording& written) -> std::string {
        try {
            trace::encode(written);
        } catch (const trace::error& refused) {
            return refused.what();
        }
        return "";
    };
    CHECK(failure(good).empty());
    trace::recording changed = good;
    changed.requests[0].turns[0].accepted = 3;
    CHECK(failure(changed) == "accepted is 3, it must be 0 to 2");
    changed = good;
    changed.requests[0].turns[0].layers[1].keys.pop_back();
    CHECK(failure(changed) == "keys is 127, it must be 128 to 128");
    changed = good;
    changed.requests.clear();
    CHECK(failure(changed) == "requests is 0, it must be 1 to 4096");
    changed = good;
    changed.head_dim = 33;
    CHECK(failure(changed) == "head_dim is 33, it must be a multiple of 8");
    changed = good;
    changed.rope_style = 2;
    CHECK(failure(changed).find("rope_dimensions is 0") == 0);
}

TEST_CASE("trace: paths that cannot be read or written say so, and nothing half is left") {
    const scratch_folder scratch;
    const auto reading = [](const std::string& path) -> std::string {
        try {
            trace::read_trace(path);
        } catch (const trace::error& refused) {
            return refused.what();
        }
        return "";
    };
    CHECK(reading(scratch.path("none")) ==
          "cannot read '" + scratch.path("none") + "': No such file or directory");
    CHECK(reading(scratch.path("")).find("cannot read '") == 0);  // a folder
    std::ofstream(scratch.path("empty")).close();
    CHECK(reading(scratch.path("empty")).find("': this is not a trace") != std::string::npos);

    CHECK_THROWS_AS(trace::output_file(scratch.path("none/t.trace")), trace::error);
    CHECK_THROWS_AS(trace::output_file(scratch.path("")), trace::error);
    CHECK_THROWS_AS(trace::output_file("/dev/null"), trace::error);
    {
        const trace::output_file left(scratch.path("t.trace"));
        CHECK(scratch.names() == std::vector<std::string>{"empty", "t.trace.part"});
    }
    CHECK(scratch.names() == std::vector<std::string>{"empty"});

    // A link stays one, what it leads to is replaced.
    std::filesystem::create_symlink("empty", scratch.path("link"));
    trace::output_file(scratch.path("link")).commit(plain_file());
    CHECK(scratch.names() == std::vector<std::string>{"empty", "link"});
    CHECK(std::filesystem::is_symlink(scratch.path("link")));
    CHECK(reading(scratch.path("empty")).empty());
}
