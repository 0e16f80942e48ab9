// Beams that diverge inside a block: at every offset, eight children and their parent write
// different tokens in random order, beams are re-ordered, one goes back before the fork, the parent
// goes. A copy that is missing, late, or taken from the wrong place shows as a wrong fingerprint.
#include <doctest/doctest.h>

#include <algorithm>

#include "checked.hpp"
#include "world.hpp"

namespace {

using namespace property;

constexpr uint32_t children = 8;

pool_spec beams(uint32_t layout, uint32_t block_tokens, uint32_t flags) {
    layer_spec full;
    full.query_heads = 2;
    full.kv_heads = 2;
    full.key_format = full.value_format = KV_FORMAT_F16;
    layer_spec windowed = full;
    windowed.window = 20;
    windowed.window_sinks = 3;
    pool_spec spec;
    spec.name = "beams";
    spec.layers = {full, windowed};
    spec.layout = layout;
    spec.block_tokens = block_tokens;
    spec.flags = flags;
    spec.max_sequences = 2 * children + 2;
    spec.max_step_sequences = children + 1;
    return spec;
}

class beam_search {
  public:
    beam_search(const pool_spec& spec, uint32_t offset)
        : world_(spec, content::fingerprints, 1000 + offset), offset_(offset) {}

    void run() {
        const uint32_t prefix = world_.model().spec.block_tokens + offset_;
        oracle_sequence* parent = world_.create();
        write({parent}, prefix);
        beams_ = world_.fork(*parent, children);
        check_blocks(prefix, 0);

        // The parent writes along with its children.
        beams_.push_back(parent);
        for (uint32_t round = 0; round < 3; ++round) {
            std::shuffle(beams_.begin(), beams_.end(), world_.random());
            write(beams_, 1);
            check_blocks(prefix, round + 1);
            if (round < 2) reorder();
        }
        // One goes back to before the fork, and writes anew behind that.
        oracle_sequence& rewound = *beams_[world_.below(beams_.size())];
        world_.truncate(rewound, prefix - std::min<uint64_t>(prefix, 1 + world_.below(5)));
        if (std::find(beams_.begin(), beams_.end(), parent) != beams_.end()) {
            world_.release(*parent);
            std::erase(beams_, parent);
        }
        write(beams_, 2);
        world_.check_all();
        world_.check_pool();
        for (oracle_sequence* beam : beams_) world_.release(*beam);
        world_.check_pool();
        const kv_pool_stats stats = world_.stats();
        require(stats.pinned == 0 && stats.slabs_free == stats.slabs_total,
                "{} blocks are held after all beams were released", stats.pinned);
    }

  private:
    void write(const std::vector<oracle_sequence*>& writers, uint32_t rows) {
        const int place = world_.begin();
        for (oracle_sequence* writer : writers) world_.append(place, *writer, rows);
        require_ok(world_.reserve(place), "kv_step_reserve");
        attention_sample everything;
        everything.rows = everything.heads = 0;
        everything.bytes = true;
        world_.forward(place, &everything);
        world_.end(place);
    }

    /// Beams are replaced by children of others, as a beam search does.
    void reorder() {
        std::vector<oracle_sequence*> next;
        for (uint32_t i = 0; i < beams_.size(); ++i) {
            oracle_sequence& source = *beams_[world_.below(beams_.size() - 1)];
            const std::vector<oracle_sequence*> child =
                next.size() < children ? world_.fork(source, 1) : std::vector<oracle_sequence*>();
            next.insert(next.end(), child.begin(), child.end());
        }
        for (oracle_sequence* old : beams_) world_.release(*old);
        beams_ = next;
    }

    /// Blocks of the layer without a window: those of the prefix, and for each writer what it has
    /// written behind the last whole block, copied prefix included.
    void check_blocks(uint32_t prefix, uint32_t written) {
        const uint32_t tokens = world_.model().spec.block_tokens;
        const uint64_t shared = (prefix + tokens - 1) / tokens;
        const uint64_t own = written == 0 ? 0 : (offset_ % tokens + written + tokens - 1) / tokens;
        std::vector<const oracle_block*> distinct;
        for (const oracle_sequence* sequence : world_.alive()) {
            for (const block_reference& block : sequence->lanes[0].table) {
                distinct.push_back(block.get());
            }
        }
        std::sort(distinct.begin(), distinct.end());
        const auto end = std::unique(distinct.begin(), distinct.end());
        // The oracle's tables are those of the library: world compares their sizes and sharing.
        require(
            static_cast<uint64_t>(end - distinct.begin()) <= shared + own * world_.alive().size(),
            "{} blocks for {} beams, {} shared and {} each would do", end - distinct.begin(),
            world_.alive().size(), shared, own);
    }

    world world_;
    uint32_t offset_;
    std::vector<oracle_sequence*> beams_;
};

}  // namespace

TEST_CASE("beams that diverge at any offset of a block keep their own history") {
    struct variant {
        uint32_t layout, block_tokens, flags;
    };
    for (const variant& v : {variant{KV_LAYOUT_NATIVE, 16, KV_POOL_DEBUG},
                             variant{KV_LAYOUT_NHD, 32, 0}, variant{KV_LAYOUT_HND, 16, 0}}) {
        for (uint32_t offset = 0; offset <= v.block_tokens; ++offset) {
            CAPTURE(v.layout);
            CAPTURE(offset);
            check_no_mismatch(
                [&] { beam_search(beams(v.layout, v.block_tokens, v.flags), offset).run(); });
        }
    }
}
