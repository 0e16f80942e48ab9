// Wrong input to the calls of a step: arguments, tensors, tables, the order of calls, limits.
#include <functional>

#include "abi/world.hpp"

using namespace abi;

namespace {

/// Two sequences of 20 tokens, and one more for other steps.
struct stepping {
    live_pool pool;
    kv_seq first, second, other;
    kv_step* closed;  // a handle that was ended
    target attacked;

    explicit stepping(const kv_pool_config& config = small_config()) : pool(config) {
        first = pool.create_sequence();
        second = pool.create_sequence();
        other = pool.create_sequence();
        pool.append(first, 20);
        pool.append(second, 20);
        closed = pool.begin();
        REQUIRE(kv_step_cancel(closed) == KV_OK);
        attacked = {pool, {first, second, other}};
    }
};

TEST_CASE("kv_step_begin") {
    const stepping w;
    kv_step* step = reinterpret_cast<kv_step*>(uintptr_t{64});
    REFUSES(target{}, KV_INVALID, "pool", kv_step_begin(nullptr, &step));
    CHECK(step == nullptr);
    REFUSES(w.attacked, KV_INVALID, "out_step", kv_step_begin(w.pool, nullptr));
    kv_step* one = w.pool.begin();
    kv_step* two = w.pool.begin();
    step = one;
    REFUSES(w.attacked, KV_LIMIT, "open", kv_step_begin(w.pool, &step));
    CHECK(step == nullptr);
    ACCEPTS(kv_step_cancel(one));
    ACCEPTS(kv_step_begin(w.pool, &one));
    ACCEPTS(kv_step_cancel(one));
    ACCEPTS(kv_step_cancel(two));
}

TEST_CASE("kv_seq_append") {
    const stepping w;
    kv_append_info info = KV_INIT(kv_append_info);
    REFUSES(target{}, KV_INVALID, "step", kv_seq_append(nullptr, w.first, nullptr, 1, &info));
    REFUSES(w.attacked, KV_INVALID, "step", kv_seq_append(w.closed, w.first, nullptr, 1, &info));
    kv_step* step = w.pool.begin();
    refuses_wrong_headers(w.attacked, "out_info", info, [&](kv_append_info* wrong) {
        return kv_seq_append(step, w.first, nullptr, 1, wrong);
    });
    REFUSES(w.attacked, KV_INVALID, "count", kv_seq_append(step, w.first, nullptr, 0, &info));
    REFUSES(w.attacked, KV_LIMIT, "max_step_tokens",
            kv_seq_append(step, w.first, nullptr, 129, &info));
    REFUSES(w.attacked, KV_LIMIT, "max_step_tokens",
            kv_seq_append(step, w.first, nullptr, UINT32_MAX, &info));
    REFUSES(w.attacked, KV_INVALID, "seq", kv_seq_append(step, 0, nullptr, 1, &info));
    const kv_seq stale = w.pool.create_sequence();
    REQUIRE(kv_seq_release(w.pool, stale) == KV_OK);
    REFUSES(w.attacked, KV_STALE, "seq", kv_seq_append(step, stale, nullptr, 1, &info));

    ACCEPTS(kv_seq_append(step, w.first, nullptr, 100, &info));
    CHECK(info.first_position == 20);
    CHECK(info.item == 0);
    CHECK(info.first_row == 0);
    REFUSES(w.attacked, KV_INVALID, "seq", kv_seq_append(step, w.first, nullptr, 1, &info));
    REFUSES(w.attacked, KV_LIMIT, "max_step_tokens",
            kv_seq_append(step, w.second, nullptr, 29, &info));
    const uint32_t ids[28] = {};
    ACCEPTS(kv_seq_append(step, w.second, ids, 28, &info));
    CHECK(info.item == 1);
    CHECK(info.first_row == 100);
    kv_step* beside = w.pool.begin();
    REFUSES(w.attacked, KV_INVALID, "seq", kv_seq_append(beside, w.first, nullptr, 1, &info));
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "reserved", kv_seq_append(step, w.other, nullptr, 1, &info));
    ACCEPTS(kv_step_cancel(step));
    ACCEPTS(kv_step_cancel(beside));
}

TEST_CASE("kv_seq_append: max_step_sequences") {
    const stepping w;
    kv_step* step = w.pool.begin();
    for (int i = 0; i < 4; ++i) {
        ACCEPTS(kv_seq_append(step, w.pool.create_sequence(), nullptr, 1, nullptr));
    }
    REFUSES(w.attacked, KV_LIMIT, "max_step_sequences",
            kv_seq_append(step, w.first, nullptr, 1, nullptr));
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_reserve") {
    const stepping w;
    kv_reserve_report report = KV_INIT(kv_reserve_report);
    REFUSES(target{}, KV_INVALID, "step", kv_step_reserve(nullptr, &report));
    REFUSES(w.attacked, KV_INVALID, "step", kv_step_reserve(w.closed, &report));
    kv_step* step = w.pool.begin();
    REFUSES(w.attacked, KV_INVALID, "appended", kv_step_reserve(step, &report));
    REQUIRE(kv_seq_append(step, w.first, nullptr, 3, nullptr) == KV_OK);
    refuses_wrong_headers(w.attacked, "report", report,
                          [&](kv_reserve_report* wrong) { return kv_step_reserve(step, wrong); });
    kv_reserve_report no_array = report;
    no_array.item_status_capacity = 1;
    REFUSES(w.attacked, KV_INVALID, "item_statuses", kv_step_reserve(step, &no_array));
    kv_status statuses[4] = {7, 7, 7, 7};
    report.item_statuses = statuses;
    report.item_status_capacity = 4;
    ACCEPTS(kv_step_reserve(step, &report));
    CHECK(report.items_that_fit == 1);
    CHECK(report.item_statuses == statuses);
    CHECK(statuses[0] == KV_OK);
    CHECK(statuses[1] == 7);
    REFUSES(w.attacked, KV_INVALID, "reserved", kv_step_reserve(step, &report));
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_reserve: LIMIT, TOO_LARGE and AGAIN change nothing") {
    kv_pool_config config = small_config();
    config.arena_bytes = uint64_t{2} << 20;
    config.max_tokens_per_sequence = 16384;
    config.max_step_tokens = 40000;
    // Blocks of 16 * 2 * (64 + 32) * 2 bytes: 341 in the only slab, two lanes.
    const stepping w(config);
    kv_status statuses[3] = {7, 7, 7};
    kv_reserve_report report = KV_INIT(kv_reserve_report);
    report.item_statuses = statuses;
    report.item_status_capacity = 2;

    kv_step* step = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 16384, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_LIMIT, "max_tokens_per_sequence", kv_step_reserve(step, &report));
    CHECK(statuses[0] == KV_LIMIT);
    CHECK(report.items_that_fit == 0);
    REQUIRE(kv_step_remove(step, w.first) == KV_OK);
    REQUIRE(kv_seq_append(step, w.first, nullptr, 16364, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_TOO_LARGE, "seq", kv_step_reserve(step, &report));
    CHECK(statuses[0] == KV_TOO_LARGE);
    // The message belongs to the status, whatever is wrong with later items.
    REQUIRE(kv_seq_append(step, w.second, nullptr, 16384, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_TOO_LARGE, "larger than the pool", kv_step_reserve(step, &report));
    CHECK(statuses[1] == KV_LIMIT);
    REQUIRE(kv_step_remove(step, w.second) == KV_OK);
    REQUIRE(kv_step_remove(step, w.first) == KV_OK);

    // 170 blocks a lane are there: 2 + 2 are taken, 160 fit, 30 more do not.
    REQUIRE(kv_seq_append(step, w.first, nullptr, 160 * 16 - 20, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(step, w.second, nullptr, 30 * 16, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(step, w.other, nullptr, 1, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_AGAIN, "blocks", kv_step_reserve(step, &report));
    CHECK(report.items_that_fit == 1);
    CHECK(statuses[0] == KV_OK);
    CHECK(statuses[1] == KV_AGAIN);
    CHECK(statuses[2] == 7);  // beyond the capacity
    // The two hold two blocks a lane each, the third none; 480 tokens behind 20 end in block 32.
    CHECK(report.need_blocks == 2 * (158 + 30 + 1));
    const uint64_t block_bytes = 16 * 2 * (64 + 32) * 2;
    CHECK(report.need_bytes == report.need_blocks * block_bytes);
    CHECK(report.free_bytes_now == (341 - 8) * block_bytes);
    CHECK(report.free_bytes_after_fence == report.free_bytes_now);
    // What fitted does fit.
    REQUIRE(kv_step_remove(step, w.second) == KV_OK);
    ACCEPTS(kv_step_reserve(step, &report));
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_remove, kv_step_accept") {
    const stepping w;
    REFUSES(target{}, KV_INVALID, "step", kv_step_remove(nullptr, w.first));
    REFUSES(target{}, KV_INVALID, "step", kv_step_accept(nullptr, w.first, 1));
    REFUSES(w.attacked, KV_INVALID, "step", kv_step_remove(w.closed, w.first));
    REFUSES(w.attacked, KV_INVALID, "step", kv_step_accept(w.closed, w.first, 1));
    kv_step* step = w.pool.begin();
    kv_step* beside = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 3, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(beside, w.second, nullptr, 3, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "seq", kv_step_remove(step, 0));
    REFUSES(w.attacked, KV_INVALID, "seq", kv_step_remove(step, w.second));
    REFUSES(w.attacked, KV_INVALID, "seq", kv_step_remove(step, w.other));
    REFUSES(w.attacked, KV_INVALID, "reserve", kv_step_accept(step, w.first, 1));
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "reserved", kv_step_remove(step, w.first));
    REFUSES(w.attacked, KV_INVALID, "seq", kv_step_accept(step, 0, 1));
    REFUSES(w.attacked, KV_INVALID, "seq", kv_step_accept(step, w.second, 1));
    REFUSES(w.attacked, KV_INVALID, "count", kv_step_accept(step, w.first, 4));
    REFUSES(w.attacked, KV_INVALID, "count", kv_step_accept(step, w.first, UINT32_MAX));
    ACCEPTS(kv_step_accept(step, w.first, 3));
    ACCEPTS(kv_step_accept(step, w.first, 0));
    ACCEPTS(kv_step_cancel(step));
    ACCEPTS(kv_step_cancel(beside));
}

TEST_CASE("kv_step_end: out of order, the step is cancelled; with a wrong report it stays open") {
    const stepping w;
    kv_step_report report = KV_INIT(kv_step_report);
    REFUSES(target{}, KV_INVALID, "step", kv_step_end(nullptr, &report));
    REFUSES(w.attacked, KV_INVALID, "step", kv_step_end(w.closed, &report));

    kv_step* step = w.pool.reserve(w.first, 3);
    refuses_wrong_headers(w.attacked, "report", report,
                          [&](kv_step_report* wrong) { return kv_step_end(step, wrong); });
    w.pool.write(step, 3);
    ACCEPTS(kv_step_end(step, &report));
    CHECK(report.accepted_tokens == 3);

    // Not reserved, then with one of two layers written.
    const std::function<kv_step*()> broken[] = {
        [&] {
            kv_step* open = w.pool.begin();
            REQUIRE(kv_seq_append(open, w.second, nullptr, 3, nullptr) == KV_OK);
            return open;
        },
        [&] {
            kv_step* open = w.pool.reserve(w.second, 3);
            const tensors t(3);
            REQUIRE(kv_write(open, 0, &t.keys, &t.values) == KV_OK);
            return open;
        },
    };
    for (const auto& open : broken) {
        const kv_seq_info before = w.pool.info(w.second);
        const kv_pool_stats stats = w.pool.stats();
        step = open();
        CHECK(kv_step_end(step, &report) == KV_INVALID);
        CHECK(last_error().find("kv_step_end") != std::string::npos);
        const kv_seq_info after = w.pool.info(w.second);
        CHECK(std::memcmp(&before, &after, sizeof before) == 0);
        kv_pool_stats now = w.pool.stats();
        CHECK(now.steps_cancelled == stats.steps_cancelled + 1);
        CHECK(now.open_steps == 0);
        now.steps_cancelled = stats.steps_cancelled;
        now.peak_live_blocks = stats.peak_live_blocks;
        CHECK(std::memcmp(&now, &stats, sizeof now) == 0);
        REFUSES(w.attacked, KV_INVALID, "step", kv_step_end(step, &report));
        REFUSES(w.attacked, KV_INVALID, "step", kv_step_cancel(step));
    }
}

TEST_CASE("kv_step_cancel puts every counter back, whether the step took blocks or not") {
    const stepping w;
    ACCEPTS(kv_step_cancel(nullptr));
    REFUSES(w.attacked, KV_INVALID, "step", kv_step_cancel(w.closed));
    // 20 tokens leave room for 12 in their second block: first without, then with new blocks.
    for (const uint32_t rows : {1u, 12u, 13u, 100u}) {
        CAPTURE(rows);
        const kv_pool_stats stats = w.pool.stats();
        const kv_seq_info before = w.pool.info(w.first);
        kv_step* step = w.pool.reserve(w.first, rows);
        w.pool.write(step, rows);
        CHECK(w.pool.info(w.first).capacity == 20 + rows);
        CHECK(w.pool.info(w.first).written == 20 + rows);
        CHECK(w.pool.info(w.first).accepted == 20);
        CHECK(w.pool.info(w.first).in_step == 1);
        ACCEPTS(kv_step_cancel(step));
        const kv_seq_info after = w.pool.info(w.first);
        CHECK(std::memcmp(&before, &after, sizeof before) == 0);
        kv_pool_stats now = w.pool.stats();
        now.steps_cancelled = stats.steps_cancelled;
        now.peak_live_blocks = stats.peak_live_blocks;
        CHECK(std::memcmp(&now, &stats, sizeof now) == 0);
        CHECK(kv_pool_check(w.pool) == KV_OK);
    }
}

/// Every wrong tensor for `name`, which must be [rows, heads, dim]. `call(tensor)` must refuse it.
template <class callable>
void refuses_tensors(const target& attacked, const char* name, const kv_tensor& good,
                     const callable& call) {
    REFUSES(attacked, KV_INVALID, name, call(nullptr));
    refuses_wrong_headers(attacked, name, good, call);
    using t = kv_tensor;
    void (*const changes[])(t&) = {
        [](t& o) { o.data = nullptr; },
        [](t& o) { o.dtype = 0; },
        [](t& o) { o.dtype = 4; },
        [](t& o) { o.dtype = UINT32_MAX; },
        [](t& o) { o.rows = 0; },
        [](t& o) { o.rows -= 1; },
        [](t& o) { o.rows += 1; },
        [](t& o) { o.rows = UINT64_MAX; },
        [](t& o) { o.heads = 0; },
        [](t& o) { o.heads += 1; },
        [](t& o) { o.heads = UINT64_MAX; },
        [](t& o) { o.dim = 0; },
        [](t& o) { o.dim -= 1; },
        [](t& o) { o.dim = UINT64_MAX; },
        [](t& o) { o.data = static_cast<char*>(o.data) + 2; },
        [](t& o) { o.data = static_cast<char*>(o.data) + 1; },
        [](t& o) { o.row_stride = INT64_MAX; },
        [](t& o) { o.row_stride = INT64_MIN; },
        [](t& o) { o.head_stride = INT64_MAX; },
        [](t& o) { o.dim_stride = INT64_MIN; },
    };
    for (std::size_t i = 0; i < sizeof changes / sizeof changes[0]; ++i) {
        CAPTURE(i);
        kv_tensor wrong = good;
        changes[i](wrong);
        REFUSES(attacked, KV_INVALID, name, call(&wrong));
    }
    kv_tensor odd = good;
    odd.dtype = KV_DTYPE_F16;
    odd.data = static_cast<char*>(odd.data) + 1;
    REFUSES(attacked, KV_INVALID, name, call(&odd));
}

TEST_CASE("kv_write") {
    const stepping w;
    const tensors t(5);
    REFUSES(target{}, KV_INVALID, "step", kv_write(nullptr, 0, &t.keys, &t.values));
    REFUSES(w.attacked, KV_INVALID, "step", kv_write(w.closed, 0, &t.keys, &t.values));
    kv_step* step = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 5, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "reserve", kv_write(step, 0, &t.keys, &t.values));
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    for (const uint32_t layer : {3u, 1024u, UINT32_MAX}) {
        REFUSES(w.attacked, KV_INVALID, "layer", kv_write(step, layer, &t.keys, &t.values));
    }
    REFUSES(w.attacked, KV_INVALID, "layer 2", kv_write(step, 2, &t.keys, &t.values));
    refuses_tensors(w.attacked, "keys", t.keys,
                    [&](const kv_tensor* wrong) { return kv_write(step, 0, wrong, &t.values); });
    refuses_tensors(w.attacked, "values", t.values,
                    [&](const kv_tensor* wrong) { return kv_write(step, 1, &t.keys, wrong); });
    ACCEPTS(kv_write(step, 0, &t.keys, &t.values));
    ACCEPTS(kv_write(step, 0, &t.keys, &t.values));
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_attend") {
    const stepping w;
    const tensors t(5);
    kv_attend_options options = KV_INIT(kv_attend_options);
    REFUSES(target{}, KV_INVALID, "step", kv_attend(nullptr, 0, &t.queries, &t.out, &options));
    REFUSES(w.attacked, KV_INVALID, "step", kv_attend(w.closed, 0, &t.queries, &t.out, &options));
    kv_step* step = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 5, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "reserve", kv_attend(step, 0, &t.queries, &t.out, &options));
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "kv_write", kv_attend(step, 0, &t.queries, &t.out, &options));
    REFUSES(w.attacked, KV_INVALID, "kv_write", kv_attend(step, 2, &t.queries, &t.out, &options));
    REQUIRE(kv_write(step, 0, &t.keys, &t.values) == KV_OK);
    for (const uint32_t layer : {3u, UINT32_MAX}) {
        REFUSES(w.attacked, KV_INVALID, "layer",
                kv_attend(step, layer, &t.queries, &t.out, &options));
    }
    refuses_wrong_headers(w.attacked, "options", options, [&](const kv_attend_options* wrong) {
        return kv_attend(step, 0, &t.queries, &t.out, wrong);
    });
    refuses_tensors(w.attacked, "queries", t.queries, [&](const kv_tensor* wrong) {
        return kv_attend(step, 0, wrong, &t.out, &options);
    });
    refuses_tensors(w.attacked, "out", t.out, [&](const kv_tensor* wrong) {
        return kv_attend(step, 0, &t.queries, wrong, nullptr);
    });
    ACCEPTS(kv_attend(step, 0, &t.queries, &t.out, &options));
    ACCEPTS(kv_attend(step, 2, &t.queries, &t.out, nullptr));
    ACCEPTS(kv_step_cancel(step));
}

/// Buffers that are large enough, filled with a pattern.
struct export_buffers {
    std::vector<int32_t> block_table = std::vector<int32_t>(64, -7);
    std::vector<int32_t> indptr = block_table, indices = block_table, last_page_len = block_table,
                         query_start = block_table, kv_len = block_table, positions = block_table,
                         slot_positions = std::vector<int32_t>(256, -7), slot_indptr = block_table,
                         sealed_blocks = block_table;
    std::vector<int64_t> slot_mapping = std::vector<int64_t>(64, -7);
    kv_tables tables = KV_INIT(kv_tables);

    export_buffers() {
        tables.block_table = block_table.data();
        tables.block_table_stride = 8;
        tables.block_table_capacity = 64;
        tables.indptr = indptr.data();
        tables.indices = indices.data();
        tables.last_page_len = last_page_len.data();
        tables.slot_mapping = slot_mapping.data();
        tables.query_start = query_start.data();
        tables.kv_len = kv_len.data();
        tables.positions = positions.data();
        tables.slot_positions = slot_positions.data();
        tables.slot_indptr = slot_indptr.data();
        tables.sealed_blocks = sealed_blocks.data();
        tables.indices_capacity = 64;
        tables.item_capacity = 63;
        tables.token_capacity = 64;
        tables.slot_positions_capacity = 256;
    }

    bool untouched() const {
        for (const auto* buffer :
             {&block_table, &indptr, &indices, &last_page_len, &query_start, &kv_len, &positions,
              &slot_positions, &slot_indptr, &sealed_blocks}) {
            for (const int32_t value : *buffer) {
                if (value != -7) return false;
            }
        }
        for (const int64_t value : slot_mapping) {
            if (value != -7) return false;
        }
        return true;
    }
};

TEST_CASE("kv_step_export: arguments and order") {
    const stepping w;
    export_buffers b;
    REFUSES(target{}, KV_INVALID, "step", kv_step_export(nullptr, 0, &b.tables));
    REFUSES(w.attacked, KV_INVALID, "step", kv_step_export(w.closed, 0, &b.tables));
    kv_step* step = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 5, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "reserve", kv_step_export(step, 0, &b.tables));
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "tables", kv_step_export(step, 0, nullptr));
    for (const uint32_t layer : {3u, UINT32_MAX}) {
        REFUSES(w.attacked, KV_INVALID, "layer", kv_step_export(step, layer, &b.tables));
    }
    for (const uint32_t kv_head : {1u, UINT32_MAX}) {  // no layer here has lanes per head
        b.tables.kv_head = kv_head;
        REFUSES(w.attacked, KV_INVALID, "kv_head", kv_step_export(step, 0, &b.tables));
    }
    b.tables.kv_head = 0;
    refuses_wrong_headers(w.attacked, "tables", b.tables,
                          [&](kv_tables* wrong) { return kv_step_export(step, 0, wrong); });
    CHECK(b.untouched());
    ACCEPTS(kv_step_cancel(step));
}

TEST_CASE("kv_step_export: LIMIT writes the needed sizes and nothing else") {
    const stepping w;
    kv_step* step = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 5, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(step, w.second, nullptr, 20, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    // 25 and 40 slots: 2 and 3 blocks.
    struct attack {
        const char* word;
        void (*change)(kv_tables&);
    };
    using k = kv_tables;
    const attack attacks[] = {
        {"block_table_stride", [](k& o) { o.block_table_stride = 2; }},
        {"block_table_stride", [](k& o) { o.block_table_stride = 0; }},
        {"block_table_stride", [](k& o) { o.block_table_stride = UINT64_MAX; }},
        {"block_table_capacity", [](k& o) { o.block_table_capacity = 15; }},
        {"block_table_capacity", [](k& o) { o.block_table_capacity = 0; }},
        {"indices_capacity", [](k& o) { o.indices_capacity = 4; }},
        {"item_capacity", [](k& o) { o.item_capacity = 1; }},
        {"token_capacity", [](k& o) { o.token_capacity = 24; }},
        {"slot_positions_capacity", [](k& o) { o.slot_positions_capacity = 129; }},
    };
    for (const attack& a : attacks) {
        export_buffers b;
        a.change(b.tables);
        REFUSES(w.attacked, KV_LIMIT, a.word, kv_step_export(step, 0, &b.tables));
        CHECK(b.untouched());
        CHECK(b.tables.indices_count == 5);
        CHECK(b.tables.slot_positions_count == 2 * 65);
        CHECK(b.tables.item_count == 2);
        CHECK(b.tables.token_count == 25);
        CHECK(b.tables.max_blocks == 3);
    }
    // A refused export is no export: the step cannot end by it.
    const tensors t(25);
    REQUIRE(kv_write(step, 1, &t.keys, &t.values) == KV_OK);
    CHECK(kv_step_end(step, nullptr) == KV_INVALID);
    CHECK(last_error().find("layer 0") != std::string::npos);
}

TEST_CASE("kv_step_export: buffers of exactly the needed size, and none at all") {
    const stepping w;
    kv_step* step = w.pool.begin();
    REQUIRE(kv_seq_append(step, w.first, nullptr, 5, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(step, w.second, nullptr, 20, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    export_buffers b;
    b.tables.block_table_stride = 3;
    b.tables.block_table_capacity = 6;
    b.tables.indices_capacity = 5;
    b.tables.item_capacity = 2;
    b.tables.token_capacity = 25;
    b.tables.slot_positions_capacity = 130;
    ACCEPTS(kv_step_export(step, 0, &b.tables));
    CHECK(b.block_table[5] >= 0);
    CHECK(b.block_table[2] == -1);
    for (const auto* buffer : {&b.block_table, &b.indices}) CHECK((*buffer)[6] == -7);
    CHECK(b.indptr[2] == 5);
    CHECK(b.indptr[3] == -7);
    CHECK(b.query_start[2] == 25);
    CHECK(b.query_start[3] == -7);
    CHECK(b.last_page_len[0] == 9);
    CHECK(b.last_page_len[1] == 8);
    CHECK(b.last_page_len[2] == -7);
    CHECK(b.kv_len[1] == 40);
    CHECK(b.sealed_blocks[1] == 0);  // in layers that seal nothing
    CHECK(b.sealed_blocks[2] == -7);
    CHECK(b.slot_mapping[24] >= 0);
    CHECK(b.slot_mapping[25] == -7);
    CHECK(b.positions[24] == 39);
    CHECK(b.slot_positions[129] == 39);
    CHECK(b.slot_positions[130] == -7);

    kv_tables nothing = KV_INIT(kv_tables);
    ACCEPTS(kv_step_export(step, 2, &nothing));
    ACCEPTS(kv_step_export(step, 1, &nothing));
    CHECK(nothing.item_count == 2);
    CHECK(nothing.block_bytes == 16 * 2 * (64 + 32) * 2);
    ACCEPTS(kv_step_end(step, nullptr));
}

TEST_CASE("inside a step: release takes effect at once, the step runs to its end") {
    const stepping w;
    kv_step* step = w.pool.reserve(w.first, 3);
    ACCEPTS(kv_seq_release(w.pool, w.first));
    ACCEPTS(kv_seq_release(w.pool, w.first));
    const target rest{w.pool, {w.second, w.other}};
    REFUSES(rest, KV_STALE, "seq", kv_step_accept(step, w.first, 1));
    kv_seq_info info = KV_INIT(kv_seq_info);
    REFUSES(rest, KV_STALE, "seq", kv_seq_get_info(w.pool, w.first, &info));
    w.pool.write(step, 3);
    const uint64_t live = w.pool.stats().live_blocks;
    ACCEPTS(kv_step_end(step, nullptr));
    CHECK(w.pool.stats().live_blocks == live - 4);
    CHECK(w.pool.stats().sequences == 2);
    CHECK(kv_pool_check(w.pool) == KV_OK);
}

TEST_CASE("a step handle kept too long meets a closed step, not the next one") {
    const stepping w;
    kv_step* old = w.closed;
    for (int i = 0; i < 8; ++i) {
        kv_step* step = w.pool.reserve(w.first, 1);
        CHECK(step != old);
        REFUSES(w.attacked, KV_INVALID, "step", kv_step_cancel(old));
        REFUSES(w.attacked, KV_INVALID, "step", kv_seq_append(old, w.second, nullptr, 1, nullptr));
        ACCEPTS(kv_step_cancel(step));
    }
}

}  // namespace
