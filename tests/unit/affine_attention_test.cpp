// Attention over affine4 keys, read in registers, row by row and by the oracle, against its
// definition in double on the records' own numbers: every instruction set, rotations of all kinds,
// positions of whole and of evicted sequences.
#include <doctest/doctest.h>

#include <set>
#include <string>

#include "affine_reference.hpp"
#include "attention/attend.hpp"
#include "format_tile_reference.hpp"
#include "paged_fixture.hpp"

using namespace kvrt;
using namespace format_test;
using paged_test::on_every_target;

namespace {

constexpr uint32_t kv_heads = 2, value_dim = 64;
constexpr uint32_t end_of_positions = uint32_t{1} << 31;

enum class scattering {
    whole,       // consecutive, and nothing says so but the sequence's length
    far,         // the same, the last that there are
    few_gaps,    // nine of ten retained
    many_gaps,   // one of two
    sparse,      // one of ten
    anywhere,    // below 2^31
    after_sinks  // four, then consecutive ones
};
constexpr scattering all_scatterings[] = {
    scattering::whole,  scattering::far,      scattering::few_gaps,   scattering::many_gaps,
    scattering::sparse, scattering::anywhere, scattering::after_sinks};

std::vector<uint32_t> draw_positions(scattering how, uint32_t slots, std::mt19937& random) {
    std::vector<uint32_t> positions;
    if (how == scattering::anywhere) {
        std::set<uint32_t> some;
        while (some.size() < slots) some.insert(random() >> (1 + random() % 24));
        return {some.begin(), some.end()};
    }
    const uint32_t apart = how == scattering::sparse ? 10 : how == scattering::many_gaps ? 2 : 1;
    uint32_t next = how == scattering::far ? end_of_positions - slots : 0;
    if (how != scattering::far && how != scattering::whole) next = random() % 100000;
    for (uint32_t slot = 0; slot < slots; ++slot) {
        positions.push_back(next);
        next += apart == 1 ? 1 : 1 + static_cast<uint32_t>(random()) % (2 * apart - 1);
        if (how == scattering::few_gaps && random() % 10 == 0) next += 1 + random() % 3;
        if (how == scattering::after_sinks && slot == 3) next += 70001;
    }
    return positions;
}

struct problem_shape {
    uint32_t dim = 64;
    rope_facts rope;
    uint32_t group = 1;
    uint32_t slots = 100, rows = 1;
    uint32_t block_tokens = 16;
    tile_order order = tile_order::native;
    scattering positions = scattering::whole;
    uint32_t value_format = KV_FORMAT_F32;
    uint32_t sealed_blocks = 0;
};

/// One sequence of records with random codes, and its definition.
struct affine_problem {
    problem_shape shape;
    std::vector<channel_facts> channels;
    std::vector<float> means, scales, table;
    position_rotation turning;
    attend_layer layer;
    std::vector<uint64_t> memory;
    std::byte* arena;
    std::vector<block_id> blocks;
    std::vector<uint32_t> position_room;
    position_store open_positions, sealed_positions;
    std::vector<uint32_t> positions[kv_heads];
    std::vector<std::vector<double>> keys[kv_heads], values[kv_heads];  // [slot][channel]
    std::vector<float> queries;                                         // [rows][heads][dim]

    affine_problem(const problem_shape& wanted, std::mt19937& random) : shape(wanted) {
        const uint32_t dim = shape.dim;
        for (uint32_t head = 0; head < kv_heads; ++head) {
            channels.emplace_back(dim, random);
            const channel_facts& facts = channels.back();
            means.insert(means.end(), facts.means.begin(), facts.means.end());
            scales.insert(scales.end(), facts.scales.begin(), facts.scales.end());
        }
        turning.pairs = shape.rope.dimensions / 2;
        turning.interleaved = shape.rope.style == KV_ROPE_INTERLEAVED;
        turning.gain = static_cast<float>(shape.rope.factor);
        table.resize(turning_table_floats(turning.pairs));
        fill_turning_table(shape.rope.frequencies.data(), turning.pairs, table.data());
        turning.table = table.data();
        make_layouts();
        place_blocks(random);
        for (uint32_t head = 0; head < kv_heads; ++head) fill_head(head, random);
        queries = gauss_row(shape.rows * layer.query_heads * dim, random);
        for (float& x : queries) x *= 0.3f;
    }
    affine_problem(const affine_problem&) = delete;
    affine_problem& operator=(const affine_problem&) = delete;

    void make_layouts() {
        const format_description& affine4 = *find_format(KV_FORMAT_AFFINE4, operand_role::keys);
        const format_description& stored = *find_format(shape.value_format, operand_role::values);
        const bool seals = stored.kind == format_class::tile_local;
        const format_description& written =
            seals ? *find_format(KV_FORMAT_F16, operand_role::values) : stored;
        const auto layout_with = [&](const format_description& format) {
            tile_layout made = make_tile_layout(shape.order, shape.block_tokens, kv_heads,
                                                shape.dim, value_dim, affine4, format);
            made.keys.channel_means = means.data();
            made.keys.channel_scales = scales.data();
            made.keys.turning = &turning;
            made.values.rotated = stored.always_rotated;
            return made;
        };
        layer.layout = layout_with(written);
        if (seals) layer.sealed_layout = layout_with(stored);
        layer.kv_heads = kv_heads;
        layer.query_heads = kv_heads * shape.group;
        layer.scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
    }

    /// Sealed blocks, then open ones, each class in an order of its own; positions beside them.
    void place_blocks(std::mt19937& random) {
        const uint32_t count = (shape.slots + shape.block_tokens - 1) / shape.block_tokens;
        uint64_t room = 0;
        const auto place = [&](uint32_t blocks_of_class, uint32_t bytes, position_store& store) {
            const uint32_t units = bytes / block_unit;
            const uint32_t first = static_cast<uint32_t>((room / block_unit + units - 1) / units);
            std::vector<block_id> ids;
            for (uint32_t i = 0; i < blocks_of_class; ++i) ids.push_back((first + i) * units);
            std::shuffle(ids.begin(), ids.end(), random);
            blocks.insert(blocks.end(), ids.begin(), ids.end());
            store.numbering = block_numbering(units);
            store.block_stride = kv_heads * shape.block_tokens;
            store.block_tokens = shape.block_tokens;
            room = uint64_t{first + blocks_of_class} * bytes;
            REQUIRE(room <= uint64_t{block_unit} * units_per_slab);
        };
        if (layer.seals()) {
            place(shape.sealed_blocks, layer.sealed_layout.block_bytes, sealed_positions);
        }
        place(count - shape.sealed_blocks, layer.layout.block_bytes, open_positions);
        memory.resize(room / 8 + 8);
        arena = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) /
                                             64 * 64);
        for (uint64_t i = 0; i < room; ++i) arena[i] = static_cast<std::byte>(random());
        const std::size_t entries = std::size_t{2} * (count + 1) * kv_heads * shape.block_tokens;
        position_room.assign(2 * entries, UINT32_MAX);
        open_positions.base = position_room.data();
        sealed_positions.base = position_room.data() + entries;
    }

    bool is_sealed(uint32_t slot) const { return slot / shape.block_tokens < shape.sealed_blocks; }
    const tile_layout& layout_of(uint32_t slot) const {
        return is_sealed(slot) ? layer.sealed_layout : layer.layout;
    }
    std::byte* block_of(uint32_t slot) const {
        return arena + uint64_t{blocks[slot / shape.block_tokens]} * block_unit;
    }

    void fill_head(uint32_t head, std::mt19937& random) {
        positions[head] = draw_positions(shape.positions, shape.slots, random);
        for (uint32_t slot = 0; slot < shape.slots; ++slot) {
            const uint32_t place = slot % shape.block_tokens;
            const position_store& store = is_sealed(slot) ? sealed_positions : open_positions;
            store.of(blocks[slot / shape.block_tokens], head)[place] = positions[head][slot];
            write_key(head, slot, random);
            if (is_sealed(slot)) {
                if (place == 0) seal_values(head, slot, random);
            } else {
                write_value(head, slot, random);
            }
        }
    }
    void write_key(uint32_t head, uint32_t slot, std::mt19937& random) {
        const operand_layout& operand = layout_of(slot).keys;
        const facts& q4_1 = facts_of(KV_FORMAT_Q4_1);
        const uint32_t place = slot % shape.block_tokens;
        std::vector<std::byte> record(q4_1.padded_bytes(shape.dim));
        for (std::byte& byte : record) byte = static_cast<std::byte>(random());
        for (uint32_t g = 0; g < q4_1.groups(shape.dim); ++g) {
            std::byte* meta = record.data() + shape.dim / 2 + g * 4;
            const double step = 0.05 + 0.01 * (random() % 30);
            const uint16_t numbers[2] = {nearest_bits(step, element::f16),
                                         nearest_bits(step * (random() % 10 - 12.0), element::f16)};
            std::memcpy(meta, numbers, sizeof numbers);
        }
        for (uint32_t word = 0; word < operand.words; ++word) {
            std::memcpy(block_of(slot) + operand.at(place, head, word),
                        record.data() + word * operand.word_bytes, operand.word_bytes);
        }
        keys[head].push_back(
            decode_affine(record.data(), channels[head], shape.rope, positions[head][slot]));
    }
    void write_value(uint32_t head, uint32_t slot, std::mt19937& random) {
        const operand_layout& operand = layer.layout.values;
        std::vector<double> row(value_dim);
        for (uint32_t i = 0; i < value_dim; ++i) {
            const double number = double{gauss_row(1, random)[0]};
            row[i] = paged_test::put_number(
                block_of(slot) + operand.at(slot % shape.block_tokens, head, i), operand.type,
                number);
        }
        values[head].push_back(operand.rotated ? hadamard(row) : row);
    }
    void seal_values(uint32_t head, uint32_t slot, std::mt19937& random) {
        const operand_layout& operand = layer.sealed_layout.values;
        const auto format =
            std::find_if(std::begin(all_tiles), std::end(all_tiles), [&](const tile_facts& one) {
                return one.id == shape.value_format && one.role == operand_role::values;
            });
        REQUIRE(format != std::end(all_tiles));
        const format_test::sealed_tile tile =
            seal(*format, gauss_tile(shape.block_tokens, value_dim, random));
        std::copy(tile.bytes.begin(), tile.bytes.end(), block_of(slot) + operand.tile_at(head));
        for (uint32_t token = 0; token < shape.block_tokens; ++token) {
            std::vector<double> row(value_dim);
            for (uint32_t i = 0; i < value_dim; ++i) row[i] = tile.value(token, i);
            values[head].push_back(hadamard(row));
        }
    }

    attend_item item() const {
        attend_item made;
        made.blocks = blocks.data();
        made.rows = shape.rows;
        made.slots = shape.slots;
        made.sealed_blocks = shape.sealed_blocks;
        made.next_position = uint64_t{positions[0].back()} + 1;
        const bool consecutive =
            shape.positions == scattering::whole || shape.positions == scattering::far;
        made.explicit_slots = consecutive ? 0 : shape.slots;
        made.window_first = int64_t{shape.slots} - shape.rows - int64_t{layer.window} + 1;
        return made;
    }
    bool sees(uint32_t row, uint32_t slot) const {
        if (slot + shape.rows - 1 - row >= shape.slots) return false;
        if (layer.window == 0 || slot < layer.window_sinks) return true;
        return int64_t{slot} >= item().window_first + int64_t{row};
    }
};

/// [rows][query heads][value_dim], then [rows][query heads] of log-sum-exps.
std::vector<double> by_definition(const affine_problem& from) {
    std::vector<double> out, log_sum_exps;
    for (uint32_t row = 0; row < from.shape.rows; ++row) {
        for (uint32_t head = 0; head < from.layer.query_heads; ++head) {
            const uint32_t kv_head = head / from.shape.group;
            const float* query = from.queries.data() +
                                 std::size_t{row * from.layer.query_heads + head} * from.shape.dim;
            std::vector<double> sums(value_dim);
            double denominator = 0;
            for (uint32_t slot = 0; slot < from.shape.slots; ++slot) {
                if (!from.sees(row, slot)) continue;
                double logit = 0;
                for (uint32_t i = 0; i < from.shape.dim; ++i) {
                    logit += double{query[i]} * from.keys[kv_head][slot][i];
                }
                logit *= double{from.layer.scale};
                if (from.layer.softcap != 0) {
                    logit = double{from.layer.softcap} * std::tanh(logit / from.layer.softcap);
                }
                const double weight = std::exp(logit);
                denominator += weight;
                for (uint32_t i = 0; i < value_dim; ++i) {
                    sums[i] += weight * from.values[kv_head][slot][i];
                }
            }
            for (const double sum : sums) out.push_back(sum / denominator);
            log_sum_exps.push_back(std::log(denominator));
        }
    }
    out.insert(out.end(), log_sum_exps.begin(), log_sum_exps.end());
    return out;
}

std::vector<float> run(const affine_problem& from, executor* threads) {
    const uint32_t heads = from.layer.query_heads, dim = from.shape.dim, rows = from.shape.rows;
    std::vector<float> out(std::size_t{rows} * heads * (value_dim + 1), -1.0f);
    std::vector<std::byte> workspace(attend_workspace_bytes(from.layer, from.shape.slots));
    const attend_item item = from.item();
    attend_call call;
    call.layer = &from.layer;
    call.arena = from.arena;
    call.positions = from.open_positions;
    call.sealed_positions = from.sealed_positions;
    call.items = &item;
    call.item_count = 1;
    call.queries = {reinterpret_cast<std::byte*>(const_cast<float*>(from.queries.data())),
                    element::f32, int64_t{heads} * dim, dim, 1};
    call.out = {reinterpret_cast<std::byte*>(out.data()), element::f32, int64_t{heads} * value_dim,
                value_dim, 1};
    call.log_sum_exp = out.data() + std::size_t{rows} * heads * value_dim;
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    if (threads == nullptr) {
        attend_reference(call);
    } else {
        attend(call, *threads);
    }
    return out;
}

/// Relative to all outputs, and the worst log-sum-exp.
double distance(const affine_problem& from, const std::vector<double>& expected,
                const std::vector<float>& got) {
    const std::size_t vectors = std::size_t{from.shape.rows} * from.layer.query_heads;
    double off = 0, size = 0, worst = 0;
    for (std::size_t i = 0; i < vectors * value_dim; ++i) {
        off += (got[i] - expected[i]) * (got[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    for (std::size_t i = vectors * value_dim; i < expected.size(); ++i) {
        worst = std::max(worst, std::abs(got[i] - expected[i]) / (1 + std::abs(expected[i])));
    }
    return std::max(std::sqrt(off / size), worst);
}

std::string in_words(const problem_shape& shape) {
    return std::to_string(shape.dim) + " dimensions, rope " + std::to_string(shape.rope.style) +
           " of " + std::to_string(shape.rope.dimensions) + ", group " +
           std::to_string(shape.group) + ", slots " + std::to_string(shape.slots) + ", rows " +
           std::to_string(shape.rows) + ", blocks of " + std::to_string(shape.block_tokens) +
           ", order " + std::to_string(static_cast<uint32_t>(shape.order)) + ", scattering " +
           std::to_string(static_cast<int>(shape.positions));
}

/// Dimensions with the rotations that models have for them, and others: halves and neighbours, all
/// of the channels and a part, with and without a factor, none.
std::vector<std::pair<uint32_t, rope_facts>> rotations() {
    return {{64, rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0)},
            {64, rope_facts(KV_ROPE_INTERLEAVED, 2, 10000.0, 1.3)},
            {80, rope_facts(KV_ROPE_HALF, 40, 10000.0, 1.0)},
            {96, rope_facts(KV_ROPE_INTERLEAVED, 96, 1000000.0, 0.7)},
            {128, rope_facts(KV_ROPE_HALF, 128, 500000.0, 1.1)},
            {128, rope_facts(KV_ROPE_INTERLEAVED, 64, 10000.0, 1.0)},
            {256, rope_facts(KV_ROPE_HALF, 256, 10000.0, 1.0)},
            {72, rope_facts()}};
}

struct one_thread {
    host_allocator allocator;
    executor threads;
    explicit one_thread(uint32_t count = 1) {
        REQUIRE(threads.start(allocator, count, nullptr) == KV_OK);
    }
};

/// With codes multiplied in every way, on every instruction set, and by the oracle.
void check(affine_problem& problem) {
    one_thread one, three(3);
    const std::vector<double> expected = by_definition(problem);
    on_every_target([&] {
        for (const code_arithmetic arithmetic :
             {code_arithmetic::matrices, code_arithmetic::dot_products, code_arithmetic::floats}) {
            // Decode alone knows several.
            if (arithmetic != code_arithmetic::matrices && problem.shape.rows != 1) continue;
            CAPTURE(static_cast<int>(arithmetic));
            problem.layer.layout.arithmetic = arithmetic;
            problem.layer.sealed_layout.arithmetic = arithmetic;
            const std::vector<float> alone = run(problem, &one.threads);
            CHECK(distance(problem, expected, alone) < 1e-5);
            CHECK(alone == run(problem, &three.threads));
        }
    });
    CHECK(distance(problem, expected, run(problem, nullptr)) < 3e-6);
}

}  // namespace

TEST_CASE("attention over affine4 keys is what its definition says, wherever they stand") {
    std::mt19937 random(91);
    uint32_t turn = 0;
    for (const auto& [dim, rope] : rotations()) {
        for (const scattering positions : all_scatterings) {
            problem_shape shape;
            shape.dim = dim;
            shape.rope = rope;
            shape.positions = positions;
            constexpr uint32_t groups[] = {1, 2, 3, 4, 7, 11};
            shape.group = groups[turn % std::size(groups)];
            // A part of a run, whole runs, and what is more than pieces begin with.
            constexpr uint32_t slots[] = {150, 3, 192, 64, 77};
            shape.slots = slots[turn % std::size(slots)];
            shape.block_tokens = turn % 3 == 0 ? 32 : 16;
            ++turn;
            CAPTURE(in_words(shape));
            affine_problem problem(shape, random);
            if (turn % 4 == 0) problem.layer.softcap = 2.0f;
            check(problem);
            problem.layer.window = 41;
            problem.layer.window_sinks = turn % 2 == 0 ? 5 : 0;
            check(problem);
        }
    }
}

TEST_CASE("several rows over affine4 keys, and layouts that kernels do not read in registers") {
    std::mt19937 random(92);
    for (const tile_order order : paged_test::all_orders) {
        for (const scattering positions : {scattering::whole, scattering::many_gaps}) {
            for (const uint32_t rows : {1u, 5u, 40u}) {
                problem_shape shape;
                shape.dim = 96;
                shape.rope = rope_facts(KV_ROPE_HALF, 48, 10000.0, 1.2);
                shape.group = 2;
                shape.slots = 130;
                shape.rows = rows;
                shape.order = order;
                shape.positions = positions;
                CAPTURE(in_words(shape));
                affine_problem problem(shape, random);
                check(problem);
            }
        }
    }
}

TEST_CASE("a long context over affine4 keys is cut into pieces that join to the whole") {
    std::mt19937 random(93);
    for (const scattering positions : {scattering::few_gaps, scattering::sparse}) {
        problem_shape shape;
        shape.dim = 128;
        shape.rope = rope_facts(KV_ROPE_HALF, 128, 500000.0, 1.0);
        shape.group = 4;
        shape.slots = 1400;
        shape.positions = positions;
        CAPTURE(in_words(shape));
        affine_problem problem(shape, random);
        check(problem);
    }
}

TEST_CASE("affine4 keys beside values whose blocks are sealed") {
    std::mt19937 random(94);
    for (const uint32_t format : {KV_FORMAT_KVARN4, KV_FORMAT_KVARN2}) {
        for (const scattering positions :
             {scattering::few_gaps, scattering::whole, scattering::sparse}) {
            for (const uint32_t sealed : {0u, 1u, 3u}) {
                for (const uint32_t rows : {1u, 4u}) {
                    problem_shape shape;
                    shape.dim = 80;
                    shape.rope = rope_facts(KV_ROPE_INTERLEAVED, 64, 10000.0, 1.1);
                    shape.group = 3;
                    shape.block_tokens = 64;
                    shape.sealed_blocks = sealed;
                    shape.slots = 64 * sealed + 37;
                    shape.rows = rows;
                    shape.positions = positions;
                    shape.value_format = format;
                    CAPTURE(in_words(shape));
                    CAPTURE(sealed);
                    affine_problem problem(shape, random);
                    check(problem);
                }
            }
        }
    }
}

TEST_CASE("a query or a key that is not finite spoils its own heads alone") {
    std::mt19937 random(95);
    problem_shape shape;
    shape.dim = 64;
    shape.rope = rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0);
    shape.group = 2;
    one_thread one;
    for (const bool flawed_query : {true, false}) {
        CAPTURE(flawed_query);
        affine_problem problem(shape, random);
        const std::vector<double> expected = by_definition(problem);
        if (flawed_query) {
            problem.queries[3 * shape.dim + 5] = NAN;  // of the last head
        } else {
            // The metadata of a record of the second KV head: all bits set.
            const operand_layout& operand = problem.layer.layout.keys;
            for (uint32_t word = 0; word < operand.words; ++word) {
                std::memset(problem.block_of(20) + operand.at(4, 1, word), 0xff, 4);
            }
        }
        on_every_target([&] {
            const std::vector<float> got = run(problem, &one.threads);
            uint32_t wrong = 0;
            for (uint32_t i = 0; i < 4 * value_dim; ++i) {
                const bool flawed = i / value_dim == 3 || (!flawed_query && i / value_dim == 2);
                wrong += flawed ? !std::isnan(got[i]) : std::abs(got[i] - expected[i]) > 1e-4;
            }
            CHECK(wrong == 0);
        });
    }
}
