//! The median time of a decode step, called from Rust: 32 layers, 64 sequences of 128 tokens and
//! more. The tensors are the same in every step, so that nothing but the calls is in the loop.

use std::error::Error;
use std::time::Instant;

use kvrt::{
    Elements, ElementsMut, Format, Layer, Model, Pool, PoolConfig, Sequence, SequenceConfig,
    Tensor, TensorMut,
};

const LAYERS: usize = 32;
const SEQUENCES: usize = 64;
const QUERY_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const PROMPT_TOKENS: usize = 128;
/// All prompts go in as one step.
const PREFILL_ROWS: usize = SEQUENCES * PROMPT_TOKENS;
const WARM_UP_STEPS: usize = 20;
const TIMED_STEPS: usize = 200;

/// What a model would compute: `[rows, heads, DIM]`, of which a step uses the first rows.
struct Activations {
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
    out: Vec<f32>,
}

fn numbers(heads: usize) -> Vec<f32> {
    (0..PREFILL_ROWS * heads * DIM).map(|i| (0.01 * i as f32).sin()).collect()
}

fn create_pool() -> kvrt::Result<Pool> {
    let layer = Layer::new(QUERY_HEADS as u32, KV_HEADS as u32, DIM as u32).key_format(Format::F16);
    let config = PoolConfig::new(1 << 30)
        .block_tokens(16)
        .max_sequences(SEQUENCES as u32)
        .max_step_tokens(PREFILL_ROWS as u32)
        .threads(1);
    Pool::create(&config, &Model::new(vec![layer; LAYERS]))
}

/// One step that brings `counts[i]` tokens of sequence i, `rows` in all.
fn run_step(
    pool: &Pool,
    sequences: &[Sequence],
    counts: &[u32],
    rows: usize,
    model: &mut Activations,
) -> kvrt::Result<()> {
    let (of_kv, of_queries) = (rows * KV_HEADS * DIM, rows * QUERY_HEADS * DIM);
    let kv_shape = [rows, KV_HEADS, DIM];
    let query_shape = [rows, QUERY_HEADS, DIM];
    let keys = Tensor::dense(Elements::F32(&model.keys[..of_kv]), kv_shape);
    let values = Tensor::dense(Elements::F32(&model.values[..of_kv]), kv_shape);
    let queries = Tensor::dense(Elements::F32(&model.queries[..of_queries]), query_shape);
    let mut out = TensorMut::dense(ElementsMut::F32(&mut model.out[..of_queries]), query_shape);

    let step = pool.begin_step()?;
    step.append_batch(sequences, counts, None, None)?;
    step.reserve()?;
    for layer in 0..LAYERS as u32 {
        step.write(layer, &keys, &values)?;
        step.attend(layer, &queries, &mut out)?;
    }
    step.accept_batch(sequences, counts)?;
    step.end()?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = Activations {
        keys: numbers(KV_HEADS),
        values: numbers(KV_HEADS),
        queries: numbers(QUERY_HEADS),
        out: vec![0.0; PREFILL_ROWS * QUERY_HEADS * DIM],
    };
    let pool = create_pool()?;
    let sequences = (0..SEQUENCES)
        .map(|_| pool.create_sequence(&SequenceConfig::new()))
        .collect::<kvrt::Result<Vec<_>>>()?;
    let prompts = [PROMPT_TOKENS as u32; SEQUENCES];
    run_step(&pool, &sequences, &prompts, PREFILL_ROWS, &mut model)?;

    let ones = [1; SEQUENCES];
    for _ in 0..WARM_UP_STEPS {
        run_step(&pool, &sequences, &ones, SEQUENCES, &mut model)?;
    }
    let mut microseconds = [0.0; TIMED_STEPS];
    for time in &mut microseconds {
        let start = Instant::now();
        run_step(&pool, &sequences, &ones, SEQUENCES, &mut model)?;
        *time = start.elapsed().as_secs_f64() * 1e6;
    }
    microseconds.sort_by(f64::total_cmp);
    let median = (microseconds[TIMED_STEPS / 2 - 1] + microseconds[TIMED_STEPS / 2]) / 2.0;
    println!("overhead language=rust layers={LAYERS} sequences={SEQUENCES} median_us={median:.1}");
    Ok(())
}
