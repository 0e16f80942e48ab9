#include "sequence/fit_affine.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "format/rows.hpp"
#include "model/identity.hpp"

namespace kvrt {

namespace {

/// Of the root mean square of a head's deviations: what a channel that varies less counts as.
constexpr double least_share = 1.0 / 64;

/// Running means and sums of squared distances from them (Welford), of one head.
struct channel_moments {
    double means[widest_row] = {};
    double squares[widest_row] = {};
    uint64_t count = 0;

    void add(const double* row, uint32_t dim) {
        const double share = 1.0 / static_cast<double>(++count);
        for (uint32_t i = 0; i < dim; ++i) {
            const double off = row[i] - means[i];
            means[i] += off * share;
            squares[i] += off * (row[i] - means[i]);
        }
    }
};

/// The channels that make a pair of `band`.
struct pair_of_channels {
    uint32_t first, second;

    pair_of_channels(const rope_description& rope, uint32_t band)
        : first(rope.style == KV_ROPE_INTERLEAVED ? 2 * band : band),
          second(rope.style == KV_ROPE_INTERLEAVED ? 2 * band + 1 : band + rope.rotated_bands()) {}
};

/// A key as it was before rotation.
void turn_back(const rope_description& rope, uint64_t position, const float* key, uint32_t dim,
               double* row) {
    std::copy_n(key, dim, row);
    for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
        const double angle = static_cast<double>(position) * rope.inverse_frequencies[band];
        const double cosine = std::cos(angle) / rope.attention_factor;
        const double sine = std::sin(angle) / rope.attention_factor;
        const pair_of_channels pair(rope, band);
        double& real = row[pair.first];
        double& imaginary = row[pair.second];
        const double before = real;
        real = before * cosine + imaginary * sine;
        imaginary = imaginary * cosine - before * sine;
    }
}

/// From variances before rotation to those behind it, which mixes the channels of a pair: over many
/// positions both vary alike.
void rotate_variances(const rope_description& rope, double* variances) {
    for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
        const pair_of_channels pair(rope, band);
        const double both = (variances[pair.first] + variances[pair.second]) / 2;
        variances[pair.first] = variances[pair.second] =
            both * rope.attention_factor * rope.attention_factor;
    }
}

/// The slots of one head: where their blocks are, and their positions.
struct head_slots {
    const std::byte* bytes;
    slot_positions known;
    const uint32_t* listed = nullptr;  ///< null: `known` says it

    uint64_t position_at(uint32_t slot) const {
        return listed != nullptr ? listed[slot] : known.at(slot);
    }
    uint32_t find(uint64_t position) const {
        if (listed == nullptr) return known.find(position);
        const uint32_t* const end = listed + known.slots;
        return static_cast<uint32_t>(std::lower_bound(listed, end, position) - listed);
    }
    slot_range within(const position_range& wanted) const {
        const uint64_t end = wanted.first + wanted.count;
        return {find(wanted.first), end < wanted.first ? known.slots : find(end)};
    }
};

/// `lanes`: as fit_affine's, or null.
head_slots slots_of(const cache& store, const sequence& source, const affine_fit& fit,
                    const fit_rows* lanes, uint32_t kv_head) {
    const layer_geometry& layer = store.model.layers[fit.layer];
    const head_place place = layer.place_of(kv_head);
    head_slots slots{store.blocks.arena(), positions_of(store, source, place.lane, place.head)};
    if (lanes == nullptr) return slots;
    const fit_rows& rows = lanes[place.lane - layer.first_lane];
    slots.bytes = rows.bytes;
    slots.known.blocks = rows.blocks;
    slots.listed = rows.positions + uint64_t{place.head} * slots.known.slots;
    return slots;
}

/// Whether all means and scales are finite.
bool fit_head(const cache& store, const sequence& source, const affine_fit& fit,
              const fit_rows* lanes, uint32_t head) {
    const layer_geometry& layer = store.model.layers[fit.layer];
    const head_place place = layer.place_of(head);
    const lane_geometry& lane = store.model.lanes[place.lane];
    const uint32_t dim = lane.layout.keys.dim, block_tokens = lane.layout.block_tokens;
    const uint32_t sealed = source.lanes[place.lane].sealed_blocks;
    const rope_description& rope = layer.stored_rope();
    const head_slots slots = slots_of(store, source, fit, lanes, head);
    const slot_range range = slots.within(fit.positions);
    channel_moments moments;
    float key[widest_row];
    double row[widest_row];
    for (uint32_t slot = range.first; slot < range.end; ++slot) {
        const uint64_t position = slots.position_at(slot);
        const uint32_t block = slot / block_tokens;
        const operand_layout& keys = (block < sealed ? lane.sealed_layout : lane.layout).keys;
        read_row(keys, block_address(slots.bytes, slots.known.blocks[block]), slot % block_tokens,
                 place.head, static_cast<uint32_t>(position), key);
        turn_back(rope, position, key, dim, row);
        moments.add(row, dim);
    }
    double* variances = moments.squares;
    for (uint32_t i = 0; i < dim; ++i) variances[i] /= static_cast<double>(moments.count);
    rotate_variances(rope, variances);
    double variance = 0;
    for (uint32_t i = 0; i < dim; ++i) variance += variances[i] / dim;
    const double least = variance == 0 ? 1.0 : least_share * std::sqrt(variance);
    float* means = fit.means + uint64_t{head} * dim;
    float* scales = fit.scales + uint64_t{head} * dim;
    bool finite = true;
    for (uint32_t i = 0; i < dim; ++i) {
        const double deviation = std::sqrt(variances[i]);
        means[i] = static_cast<float>(moments.means[i]);
        scales[i] = static_cast<float>(std::sqrt(std::max(deviation, least)));
        finite = finite && std::isfinite(means[i]) && std::isfinite(scales[i]);
    }
    return finite;
}

}  // namespace

status fit_affine(cache& store, const sequence& source, affine_fit& fit) {
    KVRT_TRY(refuse_on_device(store, "a fit of keys that the host reads"));
    return fit_affine(store, source, nullptr, fit);
}

status fit_affine(cache& store, const sequence& source, const fit_rows* lanes, affine_fit& fit) {
    const layer_geometry& layer = store.model.layers[fit.layer];
    fit.tokens_used = source.next_position;
    for (uint32_t head = 0; head < layer.kv_heads; ++head) {
        const slot_range range = slots_of(store, source, fit, lanes, head).within(fit.positions);
        fit.tokens_used = std::min<uint64_t>(fit.tokens_used, range.end - range.first);
    }
    if (fit.tokens_used < least_fit_tokens) {
        return fail(KV_LIMIT, "fit: layer {} holds {} such tokens, at least {} are needed",
                    fit.layer, fit.tokens_used, least_fit_tokens);
    }
    std::atomic<bool> finite = true;
    store.threads.for_each(layer.kv_heads, [&](uint32_t head) {
        if (!fit_head(store, source, fit, lanes, head)) finite = false;
    });
    if (!finite) {
        return fail(KV_INVALID, "fit: layer {} holds keys that are not finite", fit.layer);
    }
    operand_layout stored;
    stored.format = find_format(KV_FORMAT_AFFINE4, operand_role::keys);
    stored.dim = store.model.lanes[layer.first_lane].layout.keys.dim;
    stored.channel_means = fit.means;
    stored.channel_scales = fit.scales;
    fit.identity =
        operand_identity(stored, layer.kv_heads, {layer.stored_rope(), layer.cache_positions});
    return KV_OK;
}

}  // namespace kvrt
