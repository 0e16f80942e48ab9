// Calls that take a whole batch: the same as one call per sequence, all of it or nothing, and wrong
// input. And the count of what is alive.
#include "abi/world.hpp"

using namespace abi;

namespace {

/// Three sequences of 20 tokens in a pool of at most four a step.
struct batching {
    live_pool pool;
    kv_seq seqs[3];
    target attacked;

    batching() {
        for (kv_seq& seq : seqs) {
            seq = pool.create_sequence();
            pool.append(seq, 20);
        }
        attacked = {pool, {seqs[0], seqs[1], seqs[2]}};
    }

    kv_seq stale() const {
        const kv_seq gone = pool.create_sequence();
        REQUIRE(kv_seq_release(pool, gone) == KV_OK);
        return gone;
    }
};

TEST_CASE("kv_step_append_batch appends as single calls do") {
    const batching w;
    const uint32_t counts[] = {3, 1, 5};
    const uint32_t ids[9] = {};
    kv_append_info infos[3];
    for (kv_append_info& info : infos) info = KV_INIT(kv_append_info);
    kv_step* step = w.pool.begin();
    ACCEPTS(kv_step_append_batch(step, 3, w.seqs, counts, ids, infos));
    const uint32_t first_rows[] = {0, 3, 4};
    for (uint32_t i = 0; i < 3; ++i) {
        CHECK(infos[i].item == i);
        CHECK(infos[i].first_row == first_rows[i]);
        CHECK(infos[i].first_position == 20);
    }
    // More may follow, and single calls too.
    const kv_seq late = w.pool.create_sequence();
    kv_append_info info = KV_INIT(kv_append_info);
    ACCEPTS(kv_seq_append(step, late, nullptr, 2, &info));
    CHECK(info.item == 3);
    CHECK(info.first_row == 9);
    ACCEPTS(kv_step_reserve(step, nullptr));
    w.pool.write(step, 11);
    const kv_seq both[] = {w.seqs[2], w.seqs[0]};
    const uint32_t accepted[] = {4, 0};
    ACCEPTS(kv_step_accept_batch(step, 2, both, accepted));
    kv_step_report report = KV_INIT(kv_step_report);
    ACCEPTS(kv_step_end(step, &report));
    CHECK(report.accepted_tokens == 0 + 1 + 4 + 2);
    CHECK(w.pool.info(w.seqs[0]).accepted == 20);
    CHECK(w.pool.info(w.seqs[1]).accepted == 21);
    CHECK(w.pool.info(w.seqs[2]).accepted == 24);
}

TEST_CASE("kv_step_append_batch: an array of longer structs, whose tails are zeroed") {
    const batching w;
    struct longer {
        kv_append_info info;
        uint64_t tail;
    };
    longer infos[3];
    for (longer& one : infos) {
        one = {KV_INIT(kv_append_info), 0};
        one.info.struct_size = sizeof one;
    }
    const uint32_t counts[] = {3, 1, 5};
    kv_step* step = w.pool.begin();
    ACCEPTS(kv_step_append_batch(step, 3, w.seqs, counts, nullptr, &infos[0].info));
    CHECK(infos[2].info.first_row == 4);
    CHECK(infos[2].info.item == 2);
    CHECK(infos[2].tail == 0);
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_append_batch appends all or nothing") {
    const batching w;
    kv_step* step = w.pool.begin();
    const uint32_t counts[] = {3, 1, 5};
    const uint32_t none[] = {3, 1, 0};
    const uint32_t many[] = {3, 1, 125};
    const kv_seq repeated[] = {w.seqs[0], w.seqs[1], w.seqs[0]};
    const kv_seq unknown[] = {w.seqs[0], w.seqs[1], 0};
    const kv_seq gone[] = {w.seqs[0], w.stale(), w.seqs[1]};
    const auto append = [&](const kv_seq* seqs, const uint32_t* wanted) {
        return kv_step_append_batch(step, 3, seqs, wanted, nullptr, nullptr);
    };
    REFUSES(w.attacked, KV_INVALID, "item 2", append(w.seqs, none));
    REFUSES(w.attacked, KV_LIMIT, "item 2", append(w.seqs, many));
    REFUSES(w.attacked, KV_INVALID, "item 2", append(repeated, counts));
    REFUSES(w.attacked, KV_INVALID, "item 2", append(unknown, counts));
    REFUSES(w.attacked, KV_STALE, "item 1", append(gone, counts));
    // Nothing is left behind: everything still fits, from row 0.
    kv_append_info infos[3];
    for (kv_append_info& info : infos) info = KV_INIT(kv_append_info);
    ACCEPTS(kv_step_append_batch(step, 3, w.seqs, counts, nullptr, infos));
    CHECK(infos[0].first_row == 0);
    ACCEPTS(kv_step_reserve(step, nullptr));
    REFUSES(w.attacked, KV_INVALID, "reserved", append(w.seqs, counts));
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_append_batch: wrong arguments") {
    const batching w;
    const uint32_t counts[] = {3, 1, 5};
    kv_append_info infos[3];
    for (kv_append_info& info : infos) info = KV_INIT(kv_append_info);
    REFUSES(target{}, KV_INVALID, "step",
            kv_step_append_batch(nullptr, 3, w.seqs, counts, nullptr, infos));
    kv_step* step = w.pool.begin();
    const auto append = [&](uint32_t items, const kv_seq* seqs, const uint32_t* wanted,
                            kv_append_info* out) {
        return kv_step_append_batch(step, items, seqs, wanted, nullptr, out);
    };
    REFUSES(w.attacked, KV_INVALID, "items", append(0, w.seqs, counts, infos));
    REFUSES(w.attacked, KV_INVALID, "seqs", append(3, nullptr, counts, infos));
    REFUSES(w.attacked, KV_INVALID, "counts", append(3, w.seqs, nullptr, infos));
    REFUSES(w.attacked, KV_LIMIT, "max_step_sequences", append(5, w.seqs, counts, infos));
    REFUSES(w.attacked, KV_LIMIT, "max_step_sequences", append(UINT32_MAX, w.seqs, counts, infos));
    refuses_wrong_headers(w.attacked, "out_infos", infos[0], [&](kv_append_info* wrong) {
        return kv_step_append_batch(step, 1, w.seqs, counts, nullptr, wrong);
    });
    infos[1].struct_size += 8;
    REFUSES(w.attacked, KV_INVALID, "out_infos[1]", append(3, w.seqs, counts, infos));
    infos[1] = KV_INIT(kv_append_info);
    infos[0].struct_size = sizeof(kv_append_info) - 4;
    REFUSES(w.attacked, KV_INVALID, "multiple", append(3, w.seqs, counts, infos));
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_accept_batch notes all or nothing") {
    const batching w;
    const uint32_t counts[] = {3, 1, 5};
    REFUSES(target{}, KV_INVALID, "step", kv_step_accept_batch(nullptr, 3, w.seqs, counts));
    kv_step* step = w.pool.begin();
    REQUIRE(kv_step_append_batch(step, 2, w.seqs, counts, nullptr, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "reserve", kv_step_accept_batch(step, 2, w.seqs, counts));
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    const uint32_t less[] = {1, 0};
    const uint32_t more[] = {1, 2};
    const kv_seq strange[] = {w.seqs[0], w.seqs[2]};
    const kv_seq gone[] = {w.seqs[0], w.stale()};
    REFUSES(w.attacked, KV_INVALID, "items", kv_step_accept_batch(step, 0, w.seqs, less));
    REFUSES(w.attacked, KV_INVALID, "items", kv_step_accept_batch(step, 3, w.seqs, less));
    REFUSES(w.attacked, KV_INVALID, "seqs", kv_step_accept_batch(step, 2, nullptr, less));
    REFUSES(w.attacked, KV_INVALID, "counts", kv_step_accept_batch(step, 2, w.seqs, nullptr));
    REFUSES(w.attacked, KV_INVALID, "item 1", kv_step_accept_batch(step, 2, w.seqs, more));
    REFUSES(w.attacked, KV_INVALID, "item 1", kv_step_accept_batch(step, 2, strange, less));
    REFUSES(w.attacked, KV_STALE, "item 1", kv_step_accept_batch(step, 2, gone, less));
    w.pool.write(step, 4);
    REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    // No refused call has noted the 1 of its first item.
    CHECK(w.pool.info(w.seqs[0]).accepted == 23);
    CHECK(w.pool.info(w.seqs[1]).accepted == 21);
}

struct live_counts {
    uint64_t pools = kv_live_count(KV_LIVE_POOLS);
    uint64_t sequences = kv_live_count(KV_LIVE_SEQUENCES);
    uint64_t steps = kv_live_count(KV_LIVE_STEPS);
    bool operator==(const live_counts&) const = default;
};

TEST_CASE("kv_live_count counts pools, sequences and steps of the process") {
    const live_counts before;
    {
        const batching one, two;
        CHECK(live_counts().pools == before.pools + 2);
        CHECK(live_counts().sequences == before.sequences + 6);
        CHECK(live_counts().steps == before.steps);
        kv_step* cancelled = one.pool.begin();
        kv_step* ended = one.pool.begin();
        kv_step* open = two.pool.begin();
        CHECK(live_counts().steps == before.steps + 3);
        REQUIRE(kv_step_cancel(cancelled) == KV_OK);
        REQUIRE(kv_seq_append(ended, one.seqs[0], nullptr, 1, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(ended, nullptr) == KV_OK);
        one.pool.write(ended, 1);
        // Released inside a step: gone when the step ends.
        REQUIRE(kv_seq_release(one.pool, one.seqs[0]) == KV_OK);
        CHECK(live_counts().sequences == before.sequences + 6);
        REQUIRE(kv_step_end(ended, nullptr) == KV_OK);
        CHECK(live_counts().sequences == before.sequences + 5);
        CHECK(live_counts().steps == before.steps + 1);
        kv_seq children[2];
        REQUIRE(kv_seq_fork(one.pool, one.seqs[1], 2, children) == KV_OK);
        CHECK(live_counts().sequences == before.sequences + 7);
        REQUIRE(kv_seq_append(open, two.seqs[0], nullptr, 1, nullptr) == KV_OK);
    }
    // A pool takes its sequences and open steps with it.
    CHECK(live_counts() == before);
    CHECK(kv_live_count(0) == 0);
    CHECK(kv_live_count(4) == 0);
    CHECK(kv_live_count(UINT32_MAX) == 0);
}

TEST_CASE("kv_live_count is not changed by what was refused") {
    const live_counts before;
    kv_pool_config config = small_config();
    config.arena_bytes = 1;
    const small_model description;
    const kv_model model = description.describe();
    kv_pool* pool = nullptr;
    CHECK(kv_pool_create(&config, &model, &pool) == KV_INVALID);
    kv_pool_release(nullptr);
    CHECK(live_counts() == before);
}

}  // namespace
