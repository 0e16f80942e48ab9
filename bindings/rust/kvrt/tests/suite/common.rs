//! What the tests share: a text with made-up keys, values and queries, attention as a formula, and
//! the count of what is alive.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use kvrt::{
    live_count, Elements, ElementsMut, Layer, LiveKind, Pool, PoolConfig, PoolOf, Sequence, Step,
    Tensor, TensorMut, Threading,
};

static SESSIONS: Mutex<usize> = Mutex::new(0);

/// Every test holds one, declared first. When no test is left, nothing of the library may be.
pub struct Session(());

impl Session {
    pub fn new() -> Session {
        *sessions() += 1;
        Session(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut sessions = sessions();
        *sessions -= 1;
        if *sessions == 0 && !std::thread::panicking() {
            for kind in [LiveKind::Pools, LiveKind::Sequences, LiveKind::Steps] {
                assert_eq!(live_count(kind), 0, "{kind:?} are still alive");
            }
        }
    }
}

fn sessions() -> MutexGuard<'static, usize> {
    SESSIONS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Multiples of 1/64 between -1 and 1: exact in f32, f16 and bf16.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % 129) as f32 / 64.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The f16 bits of a number that has some.
pub fn f16_bits(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    if value == 0.0 {
        return sign;
    }
    let exponent = (value.to_bits() >> 23 & 0xff) as i32 - 127;
    let fraction = value.to_bits() & 0x7f_ffff;
    assert!((-14..16).contains(&exponent) && fraction % (1 << 13) == 0, "{value} is no f16");
    sign | (((exponent + 15) as u16) << 10) | (fraction >> 13) as u16
}

pub fn f16_value(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 0x1f);
    let fraction = f32::from(bits & 0x3ff) / 1024.0;
    match exponent {
        0 => sign * fraction * 2f32.powi(-14),
        31 => sign * f32::INFINITY,
        _ => sign * (1.0 + fraction) * 2f32.powi(exponent - 15),
    }
}

pub fn bf16_bits(value: f32) -> u16 {
    assert_eq!(value.to_bits() & 0xffff, 0, "{value} is no bf16");
    (value.to_bits() >> 16) as u16
}

pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Heads and dimensions of a layer.
#[derive(Clone, Copy)]
pub struct Shape {
    pub query_heads: usize,
    pub kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

pub const SHAPE: Shape = Shape { query_heads: 4, kv_heads: 2, key_dim: 32, value_dim: 32 };

impl Shape {
    pub fn layer(self) -> Layer {
        Layer::new(self.query_heads as u32, self.kv_heads as u32, self.key_dim as u32)
            .value_dim(self.value_dim as u32)
    }

    pub fn key_row(self) -> usize {
        self.kv_heads * self.key_dim
    }

    pub fn value_row(self) -> usize {
        self.kv_heads * self.value_dim
    }

    pub fn query_row(self) -> usize {
        self.query_heads * self.key_dim
    }

    pub fn out_row(self) -> usize {
        self.query_heads * self.value_dim
    }
}

/// What a model would compute for a text: `[layers][tokens, heads, dim]`.
pub struct Text {
    pub shape: Shape,
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
    pub queries: Vec<Vec<f32>>,
}

impl Text {
    pub fn new(shape: Shape, layers: usize, tokens: usize, seed: u64) -> Text {
        let make = |row: usize, kind: u64| {
            (0..layers as u64).map(|l| numbers(seed * 1000 + l * 10 + kind, tokens * row)).collect()
        };
        Text {
            shape,
            keys: make(shape.key_row(), 1),
            values: make(shape.value_row(), 2),
            queries: make(shape.query_row(), 3),
        }
    }

    pub fn keys(&self, layer: usize, tokens: Range<usize>) -> &[f32] {
        let row = self.shape.key_row();
        &self.keys[layer][tokens.start * row..tokens.end * row]
    }

    pub fn values(&self, layer: usize, tokens: Range<usize>) -> &[f32] {
        let row = self.shape.value_row();
        &self.values[layer][tokens.start * row..tokens.end * row]
    }

    pub fn queries(&self, layer: usize, tokens: Range<usize>) -> &[f32] {
        let row = self.shape.query_row();
        &self.queries[layer][tokens.start * row..tokens.end * row]
    }

    /// Writes and attends some tokens of the text, which are all rows of a reserved step.
    pub fn pass<T: Threading>(&self, step: &Step<'_, T>, tokens: Range<usize>) -> Vec<Vec<f32>> {
        let (shape, rows) = (self.shape, tokens.len());
        let mut outputs = Vec::new();
        for layer in 0..self.keys.len() {
            let keys = dense(self.keys(layer, tokens.clone()), rows, shape.kv_heads);
            let values = dense(self.values(layer, tokens.clone()), rows, shape.kv_heads);
            let queries = dense(self.queries(layer, tokens.clone()), rows, shape.query_heads);
            let mut out = vec![f32::NAN; rows * shape.out_row()];
            step.write(layer as u32, &keys, &values).unwrap();
            step.attend(layer as u32, &queries, &mut dense_mut(&mut out, rows, shape.query_heads))
                .unwrap();
            outputs.push(out);
        }
        outputs
    }

    /// A step of its own for some tokens of the text.
    pub fn run<T: Threading>(
        &self,
        pool: &PoolOf<T>,
        sequence: Sequence,
        tokens: Range<usize>,
    ) -> Vec<Vec<f32>> {
        let step = pool.begin_step().unwrap();
        step.append(sequence, tokens.len() as u32, None).unwrap();
        step.reserve().unwrap();
        let outputs = self.pass(&step, tokens);
        step.end().unwrap();
        outputs
    }

    /// softmax(scale * q . K + bias) V of one token's query head, over some positions, in double.
    /// Returns the output and the logarithm of the denominator; `sink` is a logit of no value.
    pub fn formula(
        &self,
        layer: usize,
        token: usize,
        head: usize,
        visible: &[usize],
        rule: &Rule,
    ) -> (Vec<f64>, f64) {
        let Shape { query_heads, kv_heads, key_dim, value_dim } = self.shape;
        let kv_head = head / (query_heads / kv_heads);
        let query = &self.queries(layer, token..token + 1)[head * key_dim..][..key_dim];
        let scale = rule.scale.unwrap_or(1.0 / (key_dim as f64).sqrt());
        let logits: Vec<f64> = visible
            .iter()
            .map(|&position| {
                let row = self.keys(layer, position..position + 1);
                let key = &row[kv_head * key_dim..][..key_dim];
                let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
                let mut logit = scale * products.sum::<f64>();
                if rule.softcap != 0.0 {
                    logit = rule.softcap * (logit / rule.softcap).tanh();
                }
                let slope = rule.slopes.get(head).copied().unwrap_or(0.0);
                logit + slope * (position as f64 - token as f64)
            })
            .collect();
        let sink = rule.sinks.get(head).copied().unwrap_or(f64::NEG_INFINITY);
        let largest = logits.iter().copied().fold(sink, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
        let denominator = weights.iter().sum::<f64>() + (sink - largest).exp();
        let mut out = vec![0.0; value_dim];
        for (&position, weight) in visible.iter().zip(&weights) {
            let row = self.values(layer, position..position + 1);
            let value = &row[kv_head * value_dim..][..value_dim];
            for (sum, v) in out.iter_mut().zip(value) {
                *sum += weight / denominator * f64::from(*v);
            }
        }
        (out, largest + denominator.ln())
    }

    /// Compares outputs of some tokens with the formula; `visible` gives what a token sees.
    pub fn assert_outputs(
        &self,
        layer: usize,
        tokens: Range<usize>,
        found: &[f32],
        tolerance: f64,
        rule: &Rule,
        visible: impl Fn(usize) -> Vec<usize>,
    ) {
        let Shape { query_heads, value_dim, .. } = self.shape;
        assert_eq!(found.len(), tokens.len() * self.shape.out_row());
        for (row, token) in tokens.enumerate() {
            for head in 0..query_heads {
                let (expected, _) = self.formula(layer, token, head, &visible(token), rule);
                let found = &found[(row * query_heads + head) * value_dim..][..value_dim];
                for (dim, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(
                        (f64::from(*found) - expected).abs() <= tolerance,
                        "layer {layer} token {token} head {head} dim {dim}: {found}, not {expected}"
                    );
                }
            }
        }
    }
}

/// What a layer adds to plain attention.
#[derive(Default)]
pub struct Rule {
    pub scale: Option<f64>,
    pub softcap: f64,
    pub slopes: Vec<f64>,
    pub sinks: Vec<f64>,
}

/// All positions up to a token's own.
pub fn causal(token: usize) -> Vec<usize> {
    (0..=token).collect()
}

pub fn dense(data: &[f32], rows: usize, heads: usize) -> Tensor<'_> {
    Tensor::dense(Elements::F32(data), [rows, heads, data.len() / rows / heads])
}

pub fn dense_mut(data: &mut [f32], rows: usize, heads: usize) -> TensorMut<'_> {
    let dim = data.len() / rows / heads;
    TensorMut::dense(ElementsMut::F32(data), [rows, heads, dim])
}

/// A small pool on one thread, whose memory can be checked.
pub fn config() -> PoolConfig {
    PoolConfig::new(8 << 20)
        .max_sequences(8)
        .max_tokens_per_sequence(512)
        .max_step_tokens(256)
        .threads(1)
        .debug(true)
}

/// A pool for `layers` layers of `SHAPE` that keep f32.
pub fn pool(layers: usize) -> Pool {
    create(&config(), layers)
}

pub fn create<T: Threading>(config: &PoolConfig, layers: usize) -> PoolOf<T> {
    PoolOf::create(config, &model(layers)).unwrap()
}

pub fn model(layers: usize) -> kvrt::Model {
    kvrt::Model::new(vec![SHAPE.layer().key_format(kvrt::Format::F32); layers])
}

pub fn sequence<T: Threading>(pool: &PoolOf<T>) -> Sequence {
    pool.create_sequence(&kvrt::SequenceConfig::new()).unwrap()
}

pub fn positions<T: Threading>(
    pool: &PoolOf<T>,
    sequence: Sequence,
    layer: u32,
    head: u32,
) -> Vec<u32> {
    let count = pool.positions(sequence, layer, head, &mut []).unwrap();
    let mut positions = vec![0; count];
    assert_eq!(pool.positions(sequence, layer, head, &mut positions).unwrap(), count);
    positions
}

/// The error must be of one kind, and say these words.
#[track_caller]
pub fn assert_error<T: std::fmt::Debug>(
    outcome: kvrt::Result<T>,
    status: kvrt::Status,
    words: &str,
) {
    let error = outcome.expect_err("this must fail");
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(words), "'{words}' is not in: {error}");
}
