//! What came out of a replay, compared with what was recorded.

use std::io::{self, Write};

use kvrt::{Pool, PoolStats, Sequence};

use super::trace::{Checksum, Recording, Turn};

#[derive(Clone)]
struct RequestResult {
    rows: usize,
    dropped: usize,
    seen: u64,
    retained: u64,
    rounds: u32,
    blocks: u64,
    checksum: Checksum,
    equal: bool,
}

pub struct Results<'t> {
    recording: &'t Recording,
    requests: Vec<RequestResult>,
    steps: u64,
    totals: Option<PoolStats>,
}

/// The kernels of another machine may round otherwise. A NaN is near nothing.
fn near(found: f32, expected: f32) -> bool {
    let (found, expected) = (f64::from(found), f64::from(expected));
    (found - expected).abs() <= 1e-5 + 1e-5 * expected.abs()
}

impl<'t> Results<'t> {
    pub fn new(recording: &'t Recording) -> Self {
        let nothing = RequestResult {
            rows: 0,
            dropped: 0,
            seen: 0,
            retained: 0,
            rounds: 0,
            blocks: 0,
            checksum: Checksum::new(),
            equal: true,
        };
        let requests = vec![nothing; recording.requests.len()];
        Results { recording, requests, steps: 0, totals: None }
    }

    pub fn count_step(&mut self) {
        self.steps += 1;
    }

    /// `outputs` are those of all rows of the turn.
    pub fn compare(&mut self, request: usize, turn: &Turn, layer: usize, outputs: &[f32]) {
        let result = &mut self.requests[request];
        if layer == 0 {
            result.rows += turn.rows();
            result.dropped += turn.rows() - turn.accepted as usize;
        }
        let expected = &turn.layers[layer].outputs;
        let skipped = (turn.rows() - turn.output_rows) * self.recording.query_size();
        for (&found, &expected) in outputs[skipped..].iter().zip(expected) {
            result.checksum.add(&found.to_le_bytes());
            result.equal &= near(found, expected);
        }
    }

    /// The state of a sequence whose turns are done.
    pub fn finish(&mut self, request: usize, pool: &Pool, sequence: Sequence) -> kvrt::Result<()> {
        let expected = &self.recording.requests[request];
        let result = &mut self.requests[request];
        let info = pool.sequence_info(sequence)?;
        result.seen = info.accepted;
        result.rounds = info.compactions;
        result.blocks = info.blocks;
        result.equal &= result.seen == u64::from(expected.seen);
        result.equal &= result.rounds == expected.rounds;
        for (layer, &retained) in expected.retained.iter().enumerate() {
            let found = pool.sequence_layer_info(sequence, layer as u32)?.retained;
            result.retained += found;
            result.equal &= found == u64::from(retained);
        }
        Ok(())
    }

    /// The counters when all requests are done.
    pub fn end(&mut self, totals: PoolStats) {
        self.totals = Some(totals);
    }

    pub fn all_equal(&self) -> bool {
        self.requests.iter().all(|result| result.equal)
    }

    pub fn print(&self, target: &mut impl Write) -> io::Result<()> {
        writeln!(
            target,
            "request prompt  rows dropped  seen retained rounds blocks checksum         outputs"
        )?;
        for (index, result) in self.requests.iter().enumerate() {
            writeln!(
                target,
                "{index:7} {:6} {:5} {:7} {:5} {:8} {:6} {:6} {:016x} {}",
                self.recording.requests[index].prompt_tokens,
                result.rows,
                result.dropped,
                result.seen,
                result.retained,
                result.rounds,
                result.blocks,
                result.checksum.value(),
                if result.equal { "equal" } else { "DIFFERENT" }
            )?;
        }
        if let Some(totals) = &self.totals {
            writeln!(
                target,
                "steps {}, tokens {}, rounds {}, blocks at most {}, returned {}, bytes returned {}",
                self.steps,
                totals.tokens_accepted,
                totals.compactions,
                totals.peak_live_blocks,
                totals.blocks_returned,
                totals.bytes_returned
            )?;
        }
        target.flush()
    }
}
