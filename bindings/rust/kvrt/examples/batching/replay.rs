//! An engine with continuous batching, whose model is a trace: prompts, decode tokens and drafts of
//! several requests in one step, as many requests at once as there are slots.

use std::error::Error;

use kvrt::{
    Elements, ElementsMut, Format, Layer, Model, Policy, Pool, PoolConfig, Rope, RopeStyle, Scorer,
    Selection, Sequence, SequenceConfig, Step, Tensor, TensorMut,
};

use super::results::Results;
use super::trace::{Recording, Request, Turn};

/// What the program may use.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Sequences that run at once.
    pub slots: usize,
    pub arena_mib: u32,
    pub threads: u32,
}

/// A request with a slot.
struct Running {
    request: usize,
    sequence: Sequence,
    next_turn: usize,
}

/// What one step brings, in the order of its rows. The vectors are as large as the pool's limits
/// from the beginning, so that nothing is allocated while the engine runs.
struct Batch {
    sequences: Vec<Sequence>,
    counts: Vec<u32>,
    accepted: Vec<u32>,
    token_ids: Vec<u32>,
    /// What the model computes for a layer, `[rows, heads, head_dim]`: f16 bits, and f32 outputs.
    queries: Vec<u16>,
    keys: Vec<u16>,
    values: Vec<u16>,
    outputs: Vec<f32>,
}

struct Engine<'p, 't> {
    recording: &'t Recording,
    pool: &'p Pool,
    slots: usize,
    /// The next request to get a slot.
    waiting: usize,
    /// Oldest first.
    running: Vec<Running>,
    batch: Batch,
    results: Results<'t>,
}

/// Runs all requests of a recording.
pub fn replay(recording: &Recording, limits: Limits) -> Result<Results<'_>, Box<dyn Error>> {
    let slots = limits.slots.min(recording.requests.len());
    let rows_of = |request: &Request| request.turns.iter().map(Turn::rows).sum::<usize>();
    let all_turns = recording.requests.iter().flat_map(|request| &request.turns);
    let most_rows = all_turns.map(Turn::rows).max().unwrap_or(0);
    let most_tokens = recording.requests.iter().map(rows_of).max().unwrap_or(0);
    let step_rows = slots * most_rows;
    let config = PoolConfig::new(u64::from(limits.arena_mib) << 20)
        .block_tokens(16)
        .max_sequences(u32::try_from(slots)?)
        .max_tokens_per_sequence(u32::try_from(most_tokens)?)
        .max_step_tokens(u32::try_from(step_rows)?)
        .threads(limits.threads);
    let pool = Pool::create(&config, &model_of(recording)?)?;
    let mut engine = Engine {
        recording,
        pool: &pool,
        slots,
        waiting: 0,
        running: Vec::with_capacity(slots),
        batch: Batch {
            sequences: Vec::with_capacity(slots),
            counts: Vec::with_capacity(slots),
            accepted: Vec::with_capacity(slots),
            token_ids: Vec::with_capacity(step_rows),
            queries: Vec::with_capacity(step_rows * recording.query_size()),
            keys: Vec::with_capacity(step_rows * recording.kv_size()),
            values: Vec::with_capacity(step_rows * recording.kv_size()),
            outputs: vec![0.0; step_rows * recording.query_size()],
        },
        results: Results::new(recording),
    };
    while engine.waiting < recording.requests.len() || !engine.running.is_empty() {
        engine.admit()?;
        engine.step()?;
        engine.retire()?;
    }
    engine.results.end(pool.counters().pool()?);
    Ok(engine.results)
}

fn model_of(recording: &Recording) -> Result<Model, Box<dyn Error>> {
    let [query_heads, kv_heads, head_dim] =
        [recording.query_heads, recording.kv_heads, recording.head_dim].map(|n| n as u32);
    let mut layer =
        Layer::new(query_heads, kv_heads, head_dim).key_format(Format::from(recording.format));
    let frequencies = &recording.inverse_frequencies;
    if !frequencies.is_empty() {
        let rope = Rope::new(RopeStyle::from(recording.rope_style))
            .dimensions(u32::try_from(2 * frequencies.len())?)
            .inverse_frequencies(frequencies.as_slice());
        layer = layer.rope(rope);
    }
    Ok(Model::new(vec![layer; recording.layer_numbers.len()]))
}

fn config_of(recording: &Recording, request: &Request) -> SequenceConfig {
    let scorer = Scorer::from(recording.scorer);
    if scorer == Scorer::None {
        return SequenceConfig::new();
    }
    let policy = Policy::new(scorer, recording.budget)
        .selection(Selection::from(recording.selection))
        .flag_bits(recording.policy_flags)
        .every(recording.every)
        .prompt_tokens(request.prompt_tokens)
        .sinks(recording.sinks)
        .recent(recording.recent)
        .offset_max(recording.offset_max)
        .seed(recording.seed);
    SequenceConfig::new().policy(policy)
}

impl Engine<'_, '_> {
    /// Gives free slots to waiting requests.
    fn admit(&mut self) -> kvrt::Result<()> {
        while self.running.len() < self.slots && self.waiting < self.recording.requests.len() {
            let config = config_of(self.recording, &self.recording.requests[self.waiting]);
            let sequence = self.pool.create_sequence(&config)?;
            self.running.push(Running { request: self.waiting, sequence, next_turn: 0 });
            self.waiting += 1;
        }
        Ok(())
    }

    /// One forward pass over the next turn of every running request.
    fn step(&mut self) -> kvrt::Result<()> {
        let step = self.pool.begin_step()?;
        self.gather();
        let batch = &self.batch;
        step.append_batch(&batch.sequences, &batch.counts, Some(&batch.token_ids), None)?;
        self.reserve(&step)?;
        for layer in 0..self.recording.layer_numbers.len() {
            self.run_layer(&step, layer)?;
        }
        step.accept_batch(&self.batch.sequences, &self.batch.accepted)?;
        step.end()?;
        for one in &mut self.running[..self.batch.sequences.len()] {
            one.next_turn += 1;
        }
        self.results.count_step();
        Ok(())
    }

    fn gather(&mut self) {
        let batch = &mut self.batch;
        batch.sequences.clear();
        batch.counts.clear();
        batch.accepted.clear();
        batch.token_ids.clear();
        for one in &self.running {
            let turn = one.turn(self.recording);
            batch.sequences.push(one.sequence);
            batch.counts.push(turn.rows() as u32);
            batch.accepted.push(turn.accepted);
            batch.token_ids.extend_from_slice(&turn.token_ids);
        }
    }

    /// Where blocks are short, the youngest wait for a later step: older ones will return theirs.
    fn reserve(&mut self, step: &Step<'_>) -> kvrt::Result<()> {
        loop {
            match step.reserve() {
                Err(kvrt::Error::Again(_)) if self.batch.sequences.len() > 1 => {}
                verdict => return verdict,
            }
            if let Some(youngest) = self.batch.sequences.pop() {
                step.remove(youngest)?;
                self.batch.accepted.pop();
            }
        }
    }

    fn run_layer(&mut self, step: &Step<'_>, layer: usize) -> kvrt::Result<()> {
        let recording = self.recording;
        let batch = &mut self.batch;
        let in_step = &self.running[..batch.sequences.len()];

        // Here an engine computes; the rows of the sequences follow each other.
        batch.queries.clear();
        batch.keys.clear();
        batch.values.clear();
        for one in in_step {
            let rows = &one.turn(recording).layers[layer];
            batch.queries.extend_from_slice(&rows.queries);
            batch.keys.extend_from_slice(&rows.keys);
            batch.values.extend_from_slice(&rows.values);
        }

        let rows = batch.queries.len() / recording.query_size();
        let kv_shape = [rows, recording.kv_heads, recording.head_dim];
        let query_shape = [rows, recording.query_heads, recording.head_dim];
        let outputs = &mut batch.outputs[..rows * recording.query_size()];
        let keys = Tensor::dense(Elements::F16(&batch.keys), kv_shape);
        let values = Tensor::dense(Elements::F16(&batch.values), kv_shape);
        let queries = Tensor::dense(Elements::F16(&batch.queries), query_shape);
        let mut out = TensorMut::dense(ElementsMut::F32(outputs), query_shape);
        step.write(layer as u32, &keys, &values)?;
        step.attend(layer as u32, &queries, &mut out)?;

        let mut left = &batch.outputs[..];
        for one in in_step {
            let turn = one.turn(recording);
            let (of_turn, behind) = left.split_at(turn.rows() * recording.query_size());
            self.results.compare(one.request, turn, layer, of_turn);
            left = behind;
        }
        Ok(())
    }

    /// Ends the sequences whose turns are done; the others keep their order.
    fn retire(&mut self) -> kvrt::Result<()> {
        let mut index = 0;
        while index < self.running.len() {
            let one = &self.running[index];
            if one.next_turn < self.recording.requests[one.request].turns.len() {
                index += 1;
                continue;
            }
            self.results.finish(one.request, self.pool, one.sequence)?;
            self.pool.release_sequence(one.sequence)?;
            self.running.remove(index);
        }
        Ok(())
    }
}

impl Running {
    fn turn<'t>(&self, recording: &'t Recording) -> &'t Turn {
        &recording.requests[self.request].turns[self.next_turn]
    }
}
