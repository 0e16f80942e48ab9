// The caches that methods are judged in, and the sequences that read a context for all of them.
//
// A context is read once, by the full cache. Beside it goes a sequence for each kind of observation
// that a method needs, and one in a cache whose heads are lanes of their own: a family. A contender
// is a fork of one of them, with its own policy.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "evaluate/configuration.hpp"
#include "evaluate/retention_batch.hpp"
#include "evaluate/retention_methods.hpp"
#include "kv_cache.hpp"
#include "llama.hpp"

namespace evaluate {

struct retention_options {
    configuration stored = reference_configuration();  // of all but what they are compared with
    std::uint32_t chunk = 64;
    bool together = false;      // tasks ask for all needles of a context at once, too
    std::uint32_t threads = 0;  // 0: one per processor
    std::vector<generate::channel_constants> key_channels;  // one a layer, where keys take them
    // One a layer, for methods that are calibrated beforehand; without, they do so as they read.
    std::vector<generate::query_statistics> statistics;
};

struct family {
    struct member {
        const retention_method* example;  // of the methods that it is for; NULL: the full cache
        cached_sequence sequence;
    };

    cached_sequence reference;    // f16
    std::vector<member> members;  // the full cache first, as all others are stored

    const cached_sequence& full() const { return members.front().sequence; }
    // Those that go beside the full cache.
    std::vector<cached_sequence> others() const;
    const cached_sequence& parent_of(const retention_method& method) const;
};

// How many sequences a family for these has.
std::size_t family_size(std::span<const contender> contenders);

// Room for so much besides the family.
struct retention_room {
    std::size_t forks = 0;
    std::size_t tokens = 0;  // of a sequence
    std::size_t rows = 0;    // of one pass
};

class retention_caches {
  public:
    static outcome<retention_caches> create(const generate::llama_model& model,
                                            std::span<const contender> contenders,
                                            const retention_options& options,
                                            const retention_room& room);

    std::span<generate::kv_cache> all() { return caches_; }
    // Whether the full cache is stored as the reference is: then they are one.
    bool is_reference() const { return stored_ == 0; }

    outcome<family> create_family();
    outcome<family> fork(const family& parent);
    outcome<nothing> release(const family& one);

    // Tokens that a contender may retain of a context for its percent of the bytes.
    std::uint32_t tokens_of(const contender& one, std::size_t length) const;

    // A fork of `parent`, with this policy from now on. A round runs at once if `compress`.
    outcome<cached_sequence> fork(const cached_sequence& parent, const kv_policy& policy,
                                  bool compress);
    outcome<nothing> release(const cached_sequence& one);

  private:
    retention_caches() = default;

    std::size_t cache_of(const retention_method& method) const;

    std::vector<generate::kv_cache> caches_;
    std::size_t stored_ = 0;  // index of the one that most contenders are in
    // Of those behind it, for methods whose heads are lanes or that demote: one that is in it.
    std::vector<const retention_method*> examples_;
    std::vector<const retention_method*> kinds_;  // of the family's members
    std::size_t longest_ = 0;
};

}  // namespace evaluate
