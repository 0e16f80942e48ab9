// Recycled memory and refused admissions: what a pool's blocks held before never shows, and a
// sequence that does not fit leaves nothing behind.
#include <doctest/doctest.h>

#include <cstring>

#include "checked.hpp"
#include "world.hpp"

namespace {

using namespace property;

/// Two lanes of one block class in different formats, and two lanes of classes of their own: blocks
/// and slabs change hands between all of them.
pool_spec mixed_formats(uint32_t layout, uint32_t flags) {
    layer_spec wide;
    wide.query_heads = 2;
    layer_spec narrow = wide;
    narrow.key_dim = narrow.value_dim = 64;
    narrow.key_format = narrow.value_format = KV_FORMAT_BF16;
    layer_spec halves = wide;
    halves.key_dim = 48;
    halves.key_format = KV_FORMAT_F16;
    halves.value_format = KV_FORMAT_F16;
    layer_spec windowed = wide;
    windowed.key_format = KV_FORMAT_BF16;
    windowed.value_format = KV_FORMAT_F16;
    windowed.window = 20;
    pool_spec spec;
    spec.name = "formats that share memory";
    spec.layers = {wide, narrow, halves, windowed};
    spec.layout = layout;
    spec.flags = flags;
    spec.slabs = 3;
    spec.max_sequences = 8;
    spec.max_tokens = 2048;
    spec.max_step_tokens = 2048;
    return spec;
}

/// Fills blocks with bytes of 0xff through the interface, in all layers, and lets them go again.
void poison(world& world, uint32_t tokens) {
    const pool_spec& spec = world.model().spec;
    kv_pool* pool = world.pool();
    std::vector<kv_seq> sequences;
    while (true) {
        kv_seq sequence = 0;
        require_ok(kv_seq_create(pool, nullptr, &sequence), "kv_seq_create");
        sequences.push_back(sequence);
        kv_step* step = nullptr;
        require_ok(kv_step_begin(pool, &step), "kv_step_begin");
        ++world.model().fences.last_begun;
        require_ok(kv_seq_append(step, sequence, nullptr, tokens, nullptr), "kv_seq_append");
        if (kv_step_reserve(step, nullptr) != KV_OK || sequences.size() == spec.max_sequences) {
            require_ok(kv_step_cancel(step), "kv_step_cancel");
            break;
        }
        std::vector<unsigned char> bytes(std::size_t{tokens} * 64 * 4, 0xff);
        for (const oracle_lane_shape& shape : world.model().lanes) {
            if (shape.first_head != 0) continue;
            kv_tensor keys = KV_INIT(kv_tensor);
            keys.data = bytes.data();
            keys.dtype = KV_DTYPE_F32;
            keys.rows = tokens;
            keys.heads = spec.layers[shape.layer].kv_heads;
            keys.dim = shape.key_dim;
            kv_tensor values = keys;
            values.dim = shape.value_dim;
            require_ok(kv_write(step, shape.layer, &keys, &values), "kv_write");
        }
        require_ok(kv_step_end(step, nullptr), "kv_step_end");
    }
    require(sequences.size() > 2, "only {} sequences fit", sequences.size());
    for (const kv_seq sequence : sequences) require_ok(kv_seq_release(pool, sequence), "release");
}

void half_a_block(const pool_spec& spec, uint32_t rows) {
    world world(spec, content::real_numbers, rows);
    poison(world, 512);
    attention_sample everything;
    everything.rows = everything.heads = 0;
    everything.bytes = true;
    oracle_sequence* sequence = world.create(nullptr, true);
    for (uint32_t steps = 0; steps < 3; ++steps) {
        const int place = world.begin();
        world.append(place, *sequence, rows);
        require_ok(world.reserve(place), "kv_step_reserve");
        world.forward(place, &everything);  // compares attention: a NaN would be a mismatch
        world.end(place);
    }
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_TRIATTENTION;
    policy.budget = rows * 2 - 1;
    world.compress(*sequence, &policy);
    const int place = world.begin();
    world.append(place, *sequence, 2);
    require_ok(world.reserve(place), "kv_step_reserve");
    world.forward(place, &everything);
    world.end(place);
    world.check_pool();
}

}  // namespace

TEST_CASE("bytes of a block's former life never show in another format") {
    for (const uint32_t layout :
         {uint32_t{KV_LAYOUT_NATIVE}, uint32_t{KV_LAYOUT_HND}, uint32_t{KV_LAYOUT_NHD}}) {
        for (const uint32_t flags : {0u, uint32_t{KV_POOL_DEBUG}, uint32_t{KV_POOL_ELASTIC}}) {
            for (const uint32_t rows : {1u, 5u, 8u, 15u, 16u, 23u}) {
                CAPTURE(layout);
                CAPTURE(flags);
                CAPTURE(rows);
                check_no_mismatch([&] { half_a_block(mixed_formats(layout, flags), rows); });
            }
        }
    }
}

TEST_CASE("ten thousand admissions into a full pool hold nothing") {
    layer_spec layer;
    layer.query_heads = layer.kv_heads = 8;
    pool_spec spec;  // 64 blocks of 16 tokens, two layers
    spec.name = "too small";
    spec.layers = {layer, layer};
    spec.slabs = 1;
    spec.max_sequences = 6;
    spec.max_tokens = 4096;
    spec.max_step_tokens = 4096;
    check_no_mismatch([&] {
        world world(spec, content::fingerprints, 18);
        oracle_sequence* resident = world.create();
        const auto admit = [&](oracle_sequence& owner, uint32_t rows) {
            const int place = world.begin();
            world.append(place, owner, rows);
            return std::pair(place, world.reserve(place));
        };
        const auto [place, found] = admit(*resident, 401);  // 26 of 32 blocks in each layer
        require_ok(found, "kv_step_reserve");
        world.forward(place, nullptr);
        world.end(place);
        const kv_pool_stats before = world.stats();
        for (uint32_t i = 0; i < 10000; ++i) {
            // A child of the resident needs six blocks a layer and a copy of the shared tail.
            oracle_sequence* guest = i % 3 == 0 ? world.fork(*resident, 1)[0] : world.create();
            const bool never = i % 7 == 0;
            const auto [open, verdict] = admit(*guest, never ? 600 : 100);
            require_status(verdict, never ? KV_TOO_LARGE : KV_AGAIN, "kv_step_reserve");
            if (i % 2 == 0) {
                world.release(*guest);  // in the step
                world.cancel(open);
            } else {
                world.remove(open, *guest);
                world.cancel(open);
                world.release(*guest);
            }
            kv_pool_stats after = world.stats();
            after.steps_cancelled = before.steps_cancelled;
            require(std::memcmp(&after, &before, sizeof after) == 0,
                    "admission {} left something behind", i);
        }
        world.check_pool();
        world.check_all();
    });
}
