//! Constants of channels: measured on keys whose means and deviations are known, and stored with.

use kvrt::{Format, Layer, Model, Pool, Rope, RopeStyle, Sequence, Status, Storage, TableBuffers};

use crate::common::*;

const TOKENS: usize = 100;
const CHANNELS: usize = 2 * 32;

fn unrotated(format: Format) -> Layer {
    SHAPE.layer().key_format(format).value_format(Format::F32).rope(Rope::new(RopeStyle::None))
}

fn pool_of(layer: Layer) -> kvrt::Result<Pool> {
    Pool::create(&config(), &Model::new([layer]))
}

fn mean_of(channel: usize) -> f32 {
    (channel as f32 - 20.0) / 8.0
}

fn deviation_of(channel: usize) -> f32 {
    (1 + channel % 5) as f32 / 4.0
}

/// A text whose keys lie a channel's deviation above its mean at even positions, below at odd ones.
fn text() -> Text {
    let mut text = Text::new(SHAPE, 1, TOKENS, 401);
    text.keys[0] = (0..TOKENS * CHANNELS)
        .map(|i| {
            let (token, channel) = (i / CHANNELS, i % CHANNELS);
            let side = if token % 2 == 0 { 1.0 } else { -1.0 };
            mean_of(channel) + side * deviation_of(channel)
        })
        .collect();
    text
}

fn filled(format: Format) -> (Pool, Sequence) {
    let pool = pool_of(unrotated(format)).unwrap();
    let sequence = sequence(&pool);
    text().run(&pool, sequence, 0..TOKENS);
    (pool, sequence)
}

#[test]
fn a_fit_gives_means_and_roots_of_deviations() {
    let _session = Session::new();
    let (pool, sequence) = filled(Format::F32);
    let whole = pool.fit_affine(sequence, 0, 2, 32, ..).unwrap();
    assert_eq!((whole.kv_heads, whole.key_dim, whole.tokens_used), (2, 32, 100));
    for channel in 0..CHANNELS {
        let found = (whole.channel_means[channel], whole.channel_scales[channel]);
        let expected = (mean_of(channel), deviation_of(channel).sqrt());
        assert!((found.0 - expected.0).abs() < 1e-6, "{channel}: {found:?}, not {expected:?}");
        assert!((found.1 - expected.1).abs() < 1e-6, "{channel}: {found:?}, not {expected:?}");
    }
    let part = pool.fit_affine(sequence, 0, 2, 32, 10..80).unwrap();
    assert_eq!(part.tokens_used, 70);
    for (channel, mean) in part.channel_means.iter().enumerate() {
        assert!((mean - mean_of(channel)).abs() < 1e-6);
    }
    for (range, tokens) in [(10..=80, 71), (0..=99, 100)] {
        assert_eq!(pool.fit_affine(sequence, 0, 2, 32, range).unwrap().tokens_used, tokens);
    }
    assert_eq!(pool.fit_affine(sequence, 0, 2, 32, 36..).unwrap().tokens_used, 64);
    assert_eq!(pool.fit_affine(sequence, 0, 2, 32, ..u64::MAX).unwrap(), whole);
}

#[test]
fn a_fit_that_cannot_be_is_an_error() {
    let _session = Session::new();
    let (pool, sequence) = filled(Format::F16);
    let refused = |layer, heads, dim, words| {
        assert_error(pool.fit_affine(sequence, layer, heads, dim, ..), Status::INVALID, words);
    };
    refused(1, 2, 32, "layer 1");
    refused(0, 2, 31, "[2, 31]");
    refused(0, 4, 32, "[4, 32]");
    refused(0, 0, 32, "[0, 32]");
    refused(0, u32::MAX, 32, "more than a layer can have");
    refused(0, u32::MAX, u32::MAX, "more than a layer can have");
    let fit = |range| pool.fit_affine(sequence, 0, 2, 32, range);
    assert_error(fit(0..63), Status::LIMIT, "63");
    assert_error(fit(90..200), Status::LIMIT, "10");
    assert_error(fit(50..50), Status::INVALID, "positions is empty");
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = fit(80..10);
    assert_error(backwards, Status::INVALID, "positions is empty");
    pool.release_sequence(sequence).unwrap();
    assert_error(fit(0..100), Status::STALE, "");

    let untold = crate::common::pool(1);
    let sequence = crate::common::sequence(&untold);
    text().run(&untold, sequence, 0..TOKENS);
    assert_error(untold.fit_affine(sequence, 0, 2, 32, ..), Status::INVALID, "rope");
}

#[test]
fn keys_are_stored_with_the_constants() {
    let _session = Session::new();
    let (pool, sequence) = filled(Format::F16);
    let fit = pool.fit_affine(sequence, 0, 2, 32, ..).unwrap();
    let affine = pool_of(unrotated(Format::Affine4).key_storage(fit.storage())).unwrap();
    let sequence = crate::common::sequence(&affine);
    let text = text();
    for tokens in [0..60, 60..TOKENS] {
        let out = &text.run(&affine, sequence, tokens.clone())[0];
        text.assert_outputs(0, tokens, out, 0.25, &Rule::default(), causal);
    }
    let identity_of = |pool: &Pool| {
        let mut step = pool.begin_step().unwrap();
        step.append(crate::common::sequence(pool), 1, None).unwrap();
        step.reserve().unwrap();
        let mut buffers = TableBuffers::default();
        let tables = step.export(0, &mut buffers).unwrap();
        // 4 bits of 32 channels, a scale and a minimum.
        assert_eq!(tables.key_words() * tables.key_word_bytes(), 16 + 4);
        tables.key_identity()
    };
    assert_eq!(identity_of(&affine), fit.identity);
    let mut means = fit.channel_means.clone();
    means[63] += 0.5;
    let other = Storage::new().channels(2, 32, means, fit.channel_scales.clone());
    let other = pool_of(unrotated(Format::Affine4).key_storage(other)).unwrap();
    assert_ne!(identity_of(&other), fit.identity);
}

#[test]
fn constants_must_be_there_and_fit() {
    let _session = Session::new();
    let ones = |heads, dim, means: usize, scales: usize| {
        let storage = Storage::new().channels(heads, dim, vec![1.0; means], vec![1.0; scales]);
        pool_of(unrotated(Format::Affine4).key_storage(storage))
    };
    ones(2, 32, 64, 64).unwrap();
    let refused = |pool, words| assert_error(pool, Status::INVALID, words);
    refused(ones(2, 32, 63, 64), "storage: means of channels: 63 elements, 64 are needed");
    refused(ones(2, 32, 64, 65), "storage: scales of channels: 65 elements, 64 are needed");
    refused(ones(2, 32, 64, 0), "storage: scales of channels: 0 elements");
    refused(ones(u32::MAX, u32::MAX, 64, 64), "storage: means of channels");
    refused(ones(4, 16, 64, 64), "[4, 16]");
    refused(pool_of(unrotated(Format::Affine4)), "kv_seq_fit_affine");
    let constants = || Storage::new().channels(2, 32, vec![1.0; 64], vec![1.0; 64]);
    let flawed = Storage::new().channels(2, 32, vec![1.0; 64], vec![0.0; 64]);
    refused(pool_of(unrotated(Format::Affine4).key_storage(flawed)), "channel_scales[0]");
    refused(pool_of(unrotated(Format::Q4_1).key_storage(constants())), "no use");
    let untold = SHAPE.layer().key_format(Format::Affine4).value_format(Format::F16);
    refused(pool_of(untold.key_storage(constants())), "KV_ROPE_NONE");
    for values in [Format::Affine4, Format::Default] {
        let layer = unrotated(Format::Affine4).value_format(values).key_storage(constants());
        assert_error(pool_of(layer), Status::UNSUPPORTED, "keys alone");
    }
}
