//! Statistics of queries: gathered ones against the formula, files, and arrays of the caller.

use std::path::PathBuf;

use kvrt::{
    CompressOutcome, Error, Format, Model, Policy, Pool, QueryStatistics, Rope, RopeStyle, Scorer,
    Sequence, SequenceConfig, Status,
};

use crate::common::*;

const TOKENS: usize = 50;
/// 24 of 32 dimensions are rotated: 12 bands, and 8 of their own.
const ROTATED: usize = 24;
const BANDS: u32 = 20;

fn frequencies() -> Vec<f64> {
    (0..ROTATED / 2).map(|band| 100f64.powf(-2.0 * band as f64 / ROTATED as f64)).collect()
}

fn rotated_model(frequencies: Vec<f64>) -> Model {
    let rope = Rope::new(RopeStyle::Half)
        .dimensions(ROTATED as u32)
        .attention_factor(1.25)
        .inverse_frequencies(frequencies);
    Model::new(vec![SHAPE.layer().key_format(Format::F32).rope(rope); 2])
}

fn rotated_pool() -> Pool {
    Pool::create(&config(), &rotated_model(frequencies())).unwrap()
}

fn gathering(pool: &Pool) -> Sequence {
    pool.create_sequence(&SequenceConfig::new().gather_statistics(true)).unwrap()
}

/// Means of the queries of a text, turned back by their positions.
fn expected(text: &Text, layer: usize) -> QueryStatistics {
    let mut means = QueryStatistics::with_covariances(layer as u32, 4, BANDS);
    means.tokens = TOKENS as u64;
    for head in 0..4 {
        for band in 0..BANDS as usize {
            let (mut real, mut imaginary, mut magnitude) = (0.0, 0.0, 0.0);
            let mut squares = [0.0; 3]; // of the first dimension, the second, both
            for token in 0..TOKENS {
                let query = &text.queries(layer, token..token + 1)[head * 32..][..32];
                let at = |dim: usize| f64::from(query[dim]);
                if band < ROTATED / 2 {
                    let (a, b) = (at(band) / 1.25, at(band + ROTATED / 2) / 1.25);
                    let (sine, cosine) = (frequencies()[band] * token as f64).sin_cos();
                    let (first, second) = (a * cosine + b * sine, b * cosine - a * sine);
                    real += first;
                    imaginary += second;
                    magnitude += a.hypot(b);
                    let products = [first * first, second * second, first * second];
                    for (square, product) in squares.iter_mut().zip(products) {
                        *square += product;
                    }
                } else {
                    let own = at(ROTATED + band - ROTATED / 2);
                    real += own;
                    magnitude += own.abs();
                    squares[0] += own * own;
                }
            }
            let index = head * BANDS as usize + band;
            means.mean_real[index] = (real / TOKENS as f64) as f32;
            means.mean_imaginary[index] = (imaginary / TOKENS as f64) as f32;
            means.mean_magnitude[index] = (magnitude / TOKENS as f64) as f32;
            let (real, imaginary) = (real / TOKENS as f64, imaginary / TOKENS as f64);
            let [first, second, both] = squares.map(|square| square / TOKENS as f64);
            means.variance_real[index] = (first - real * real) as f32;
            means.variance_imaginary[index] = (second - imaginary * imaginary) as f32;
            means.covariance[index] = (both - real * imaginary) as f32;
        }
    }
    means
}

fn assert_close(found: &QueryStatistics, expected: &QueryStatistics) {
    assert_eq!((found.layer, found.tokens), (expected.layer, expected.tokens));
    for (found, expected) in [
        (&found.mean_real, &expected.mean_real),
        (&found.mean_imaginary, &expected.mean_imaginary),
        (&found.mean_magnitude, &expected.mean_magnitude),
        (&found.variance_real, &expected.variance_real),
        (&found.variance_imaginary, &expected.variance_imaginary),
        (&found.covariance, &expected.covariance),
    ] {
        for (band, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() < 2e-6, "band {band}: {found}, not {expected}");
        }
    }
}

/// A file of this test's own, removed at its end.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> File {
        let name = format!("kvrt-{}-{name}", std::process::id());
        File(std::env::temp_dir().join(name))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn gathered_means_are_those_of_the_queries_before_rotation() {
    let _session = Session::new();
    let pool = rotated_pool();
    let sequence = gathering(&pool);
    let text = Text::new(SHAPE, 2, TOKENS, 61);
    text.run(&pool, sequence, 0..30);
    text.run(&pool, sequence, 30..TOKENS);
    for layer in 0..2 {
        let mut found = QueryStatistics::with_covariances(layer as u32, 4, BANDS);
        pool.read_statistics(sequence, &mut found).unwrap();
        assert_close(&found, &expected(&text, layer));
        assert!(found.variance_real.iter().all(|&variance| variance > 0.0));

        let mut means = QueryStatistics::new(layer as u32, 4, BANDS);
        pool.read_statistics(sequence, &mut means).unwrap();
        assert_eq!(means.mean_real, found.mean_real);
        assert!(means.covariance.is_empty());

        // What was read can be set, and what is impossible cannot.
        pool.set_statistics(&found).unwrap();
        found.covariance[3] = 9.0;
        assert_error(pool.set_statistics(&found), Status::INVALID, "covariance");
        found.covariance.clear();
        assert_error(pool.set_statistics(&found), Status::INVALID, "covariance");
        pool.set_statistics(&means).unwrap();
    }
}

#[test]
fn calls_that_opt_out_teach_nothing() {
    let _session = Session::new();
    let pool = rotated_pool();
    let sequence = gathering(&pool);
    let text = Text::new(SHAPE, 2, TOKENS, 62);
    let step = pool.begin_step().unwrap();
    step.append(sequence, TOKENS as u32, None).unwrap();
    step.reserve().unwrap();
    for layer in 0..2 {
        let mut out = vec![0.0; TOKENS * SHAPE.out_row()];
        let (keys, values) = (&text.keys[layer], &text.values[layer]);
        let queries = dense(&text.queries[layer], TOKENS, 4);
        step.write(layer as u32, &dense(keys, TOKENS, 2), &dense(values, TOKENS, 2)).unwrap();
        let options = kvrt::AttendOptions { no_statistics: layer == 0, ..Default::default() };
        let mut out = dense_mut(&mut out, TOKENS, 4);
        step.attend_with(layer as u32, &queries, &mut out, options).unwrap();
    }
    step.end().unwrap();
    let mut silent = QueryStatistics::new(0, 4, BANDS);
    silent.mean_real.fill(9.0);
    pool.read_statistics(sequence, &mut silent).unwrap();
    assert!(silent.mean_real.iter().all(|&mean| mean == 0.0), "{:?}", silent.mean_real);
    let mut heard = QueryStatistics::with_covariances(1, 4, BANDS);
    pool.read_statistics(sequence, &mut heard).unwrap();
    assert_close(&heard, &expected(&text, 1));
}

#[test]
fn a_file_brings_statistics_to_another_pool() {
    let _session = Session::new();
    let file = File::new("statistics");
    let text = Text::new(SHAPE, 2, TOKENS, 63);
    let kept_by_file = {
        let pool = rotated_pool();
        let teacher = gathering(&pool);
        assert_error(pool.save_statistics(teacher, &file.0), Status::INVALID, "no queries");
        text.run(&pool, teacher, 0..TOKENS);
        pool.save_statistics(teacher, &file.0).unwrap();

        let pool = rotated_pool();
        pool.load_statistics(&file.0).unwrap();
        compressed(&pool, &text)
    };
    let kept_by_arrays = {
        let pool = rotated_pool();
        for layer in 0..2 {
            pool.set_statistics(&expected(&text, layer)).unwrap();
        }
        compressed(&pool, &text)
    };
    assert_eq!(kept_by_file, kept_by_arrays);

    let mut other = frequencies();
    other[3] *= 1.5;
    let other = Pool::create(&config(), &rotated_model(other)).unwrap();
    let outcome = other.load_statistics(&file.0);
    assert!(matches!(outcome, Err(Error::Corrupt(_))), "{outcome:?}");
    let mut bytes = std::fs::read(&file.0).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file.0, bytes).unwrap();
    assert_error(rotated_pool().load_statistics(&file.0), Status::CORRUPT, "");
}

/// What a sequence that has seen no queries keeps by the pool's statistics.
fn compressed(pool: &Pool, text: &Text) -> Vec<Vec<u32>> {
    let sequence = sequence(pool);
    text.run(pool, sequence, 0..TOKENS);
    let policy = Policy::new(Scorer::TriAttention, 20);
    let report = pool.compress(sequence, Some(&policy)).unwrap();
    assert_eq!(report.outcome, CompressOutcome::Done);
    (0..4).map(|index| positions(pool, sequence, index / 2, index % 2)).collect()
}

#[test]
fn without_statistics_a_round_says_so() {
    let _session = Session::new();
    let pool = rotated_pool();
    let sequence = sequence(&pool);
    Text::new(SHAPE, 2, TOKENS, 64).run(&pool, sequence, 0..TOKENS);
    let report = pool.compress(sequence, Some(&Policy::new(Scorer::TriAttention, 20))).unwrap();
    assert_eq!(report.outcome, CompressOutcome::NoStatistics);

    let odd = Policy::new(Scorer::TriAttention, 20).offset_max(3);
    assert_error(pool.set_policy(sequence, Some(&odd)), Status::INVALID, "offset_max");

    // Those of the pool do not count for a policy that wants its own.
    for layer in 0..2 {
        pool.set_statistics(&expected(&Text::new(SHAPE, 2, TOKENS, 66), layer)).unwrap();
    }
    let online = Policy::new(Scorer::TriAttention, 20).statistics_online(true);
    let report = pool.compress(sequence, Some(&online)).unwrap();
    assert_eq!(report.outcome, CompressOutcome::NoStatistics);
}

#[test]
fn files_that_cannot_be_are_io_errors() {
    let _session = Session::new();
    let pool = rotated_pool();
    let sequence = gathering(&pool);
    Text::new(SHAPE, 2, TOKENS, 65).run(&pool, sequence, 0..TOKENS);
    let nowhere = std::env::temp_dir().join("kvrt-no-such-folder/file");
    assert_error(pool.load_statistics(&nowhere), Status::IO, "kvrt-no-such-folder");
    assert_error(pool.save_statistics(sequence, &nowhere), Status::IO, "kvrt-no-such-folder");
    assert_error(pool.load_statistics("a\0b"), Status::INVALID, "zero byte");
    assert_error(pool.save_statistics(sequence, "a\0b"), Status::INVALID, "zero byte");
    assert!(pool.load_statistics("").is_err());
}

#[test]
fn arrays_of_a_wrong_length_never_reach_the_library() {
    let _session = Session::new();
    let pool = rotated_pool();
    let sequence = gathering(&pool);
    let good = expected(&Text::new(SHAPE, 2, TOKENS, 66), 0);
    type Damage = fn(&mut QueryStatistics);
    let damages: [(Damage, &str); 8] = [
        (|s| s.mean_real.truncate(3), "mean_real: 3 elements, 80 are needed"),
        (|s| s.mean_imaginary.clear(), "mean_imaginary: 0 elements"),
        (|s| s.mean_magnitude.push(0.0), "mean_magnitude: 81 elements"),
        (|s| s.bands = 16, "mean_real: 80 elements, 64 are needed"),
        (|s| s.query_heads = u32::MAX, "mean_real"),
        (|s| *s = QueryStatistics::new(0, 4, 16), "[4, 16]"),
        (|s| s.layer = 2, "layer 2"),
        (|s| *s = QueryStatistics::default(), "[0, 0]"),
    ];
    for (damage, words) in damages {
        let mut bad = good.clone();
        damage(&mut bad);
        assert_error(pool.set_statistics(&bad), Status::INVALID, words);
        assert_error(pool.read_statistics(sequence, &mut bad), Status::INVALID, words);
    }
    let mut bad = good.clone();
    bad.mean_real[7] = f32::NAN;
    assert_error(pool.set_statistics(&bad), Status::INVALID, "not finite");
    bad = good;
    bad.tokens = 0;
    assert_error(pool.set_statistics(&bad), Status::INVALID, "tokens is 0");
}
