//! The reading of a trace: what a model handed to the cache, and what it got back. The format is
//! described in docs/trace.md.

use std::fmt;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

const MAGIC: &[u8] = b"KVTRACE1";
const CHECKSUM_BYTES: usize = 8;

/// Why a file is no trace.
#[derive(Debug)]
pub struct TraceError(String);

impl fmt::Display for TraceError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for TraceError {}

type Result<T> = std::result::Result<T, TraceError>;

/// The layers of a model for some requests.
pub struct Recording {
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `KV_FORMAT_*`, `KV_ROPE_*`, `KV_SCORER_*`, `KV_SELECT_*`, `KV_POLICY_*`.
    pub format: u32,
    pub rope_style: u32,
    pub scorer: u32,
    pub selection: u32,
    pub policy_flags: u32,
    pub budget: u32,
    pub every: u32,
    pub sinks: u32,
    pub recent: u32,
    pub offset_max: u32,
    pub seed: u64,
    /// One for each pair of rotated dimensions.
    pub inverse_frequencies: Vec<f64>,
    /// Which layers of the model these are.
    pub layer_numbers: Vec<u32>,
    pub requests: Vec<Request>,
}

/// One sequence from its creation to its release.
pub struct Request {
    pub prompt_tokens: u32,
    /// Rounds of compaction that removed something.
    pub rounds: u32,
    /// Tokens accepted in all.
    pub seen: u32,
    /// Tokens that each layer still holds at the end.
    pub retained: Vec<u32>,
    pub turns: Vec<Turn>,
}

/// What a sequence brought to one step.
pub struct Turn {
    pub accepted: u32,
    /// Outputs follow for the last so many rows.
    pub output_rows: usize,
    /// One for each row.
    pub token_ids: Vec<u32>,
    pub layers: Vec<LayerRows>,
}

/// What passed between the model and one layer of its cache: `[rows, heads, head_dim]` each.
pub struct LayerRows {
    /// f16 bits, as keys and values.
    pub queries: Vec<u16>,
    pub keys: Vec<u16>,
    pub values: Vec<u16>,
    pub outputs: Vec<f32>,
}

impl Recording {
    pub fn read(path: &Path) -> Result<Recording> {
        let named = |problem: String| TraceError(format!("'{}': {problem}", path.display()));
        let kind = fs::metadata(path).map_err(|error| named(error.to_string()))?;
        if !kind.is_file() {
            return Err(named("this is not a regular file".to_string()));
        }
        let bytes = fs::read(path).map_err(|error| named(error.to_string()))?;
        Recording::decode(&bytes).map_err(|TraceError(problem)| named(problem))
    }

    /// Checks every count before it allocates by it.
    pub fn decode(file: &[u8]) -> Result<Recording> {
        if file.len() < MAGIC.len() + CHECKSUM_BYTES || !file.starts_with(MAGIC) {
            return fail("this is not a trace: it does not begin with KVTRACE1");
        }
        let (content, recorded) = file.split_at(file.len() - CHECKSUM_BYTES);
        let mut computed = Checksum::new();
        computed.add(content);
        if recorded != computed.value().to_le_bytes() {
            return fail("the checksum does not match: the file is damaged or cut short");
        }
        let mut reader = Reader { left: &content[MAGIC.len()..] };
        let recording = read_recording(&mut reader)?;
        if !reader.left.is_empty() {
            return fail(format!("{} bytes lie behind the last request", reader.left.len()));
        }
        Ok(recording)
    }

    /// Elements of one row of queries or outputs.
    pub fn query_size(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Elements of one row of keys or values.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

impl Turn {
    pub fn rows(&self) -> usize {
        self.token_ids.len()
    }
}

/// FNV-1a, 64 bits.
#[derive(Clone, Copy)]
pub struct Checksum(u64);

impl Checksum {
    pub fn new() -> Checksum {
        Checksum(0xcbf2_9ce4_8422_2325)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub fn value(self) -> u64 {
        self.0
    }
}

fn fail<T>(problem: impl Into<String>) -> Result<T> {
    Err(TraceError(problem.into()))
}

fn check_range(name: &str, value: u32, bounds: RangeInclusive<u32>) -> Result<usize> {
    if bounds.contains(&value) {
        return Ok(value as usize);
    }
    fail(format!("{name} is {value}, it must be {} to {}", bounds.start(), bounds.end()))
}

/// Takes little-endian numbers from the front of what is left.
struct Reader<'f> {
    left: &'f [u8],
}

impl Reader<'_> {
    /// `elements` of N bytes each, if the file holds as many.
    fn array<T, const N: usize>(
        &mut self,
        name: &str,
        elements: usize,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>> {
        let bytes = elements.checked_mul(N).filter(|&bytes| bytes <= self.left.len());
        let Some(bytes) = bytes else {
            return fail(format!(
                "the file ends within {name}: {elements} elements of {N} bytes are needed, {} \
                 bytes are left",
                self.left.len()
            ));
        };
        let (taken, left) = self.left.split_at(bytes);
        self.left = left;
        let mut element = [0; N];
        let decoded = taken.chunks_exact(N).map(|chunk| {
            element.copy_from_slice(chunk);
            decode(element)
        });
        Ok(decoded.collect())
    }

    fn one<T: Copy, const N: usize>(&mut self, name: &str, decode: fn([u8; N]) -> T) -> Result<T> {
        Ok(self.array(name, 1, decode)?[0])
    }

    fn u32(&mut self, name: &str) -> Result<u32> {
        self.one(name, u32::from_le_bytes)
    }

    fn count(&mut self, name: &str, bounds: RangeInclusive<u32>) -> Result<usize> {
        let value = self.u32(name)?;
        check_range(name, value, bounds)
    }
}

fn read_recording(from: &mut Reader) -> Result<Recording> {
    let layers = from.count("layers", 1..=64)?;
    let query_heads = from.count("query_heads", 1..=1024)?;
    let kv_heads = from.count("kv_heads", 1..=1024)?;
    let head_dim = from.count("head_dim", 32..=256)?;
    let format = from.u32("format")?;
    let rope_style = from.u32("rope_style")?;
    let rope_dimensions = from.count("rope_dimensions", 0..=head_dim as u32)?;
    if query_heads % kv_heads != 0 {
        return fail(format!("query_heads is {query_heads}, no multiple of kv_heads {kv_heads}"));
    }
    if head_dim % 8 != 0 {
        return fail(format!("head_dim is {head_dim}, it must be a multiple of 8"));
    }
    if rope_dimensions % 2 != 0 || (rope_dimensions == 0) != (rope_style == 0) {
        return fail(format!(
            "rope_dimensions is {rope_dimensions}, it must be even, and 0 exactly when nothing is \
             rotated"
        ));
    }
    let scorer = from.u32("scorer")?;
    let selection = from.u32("selection")?;
    let policy_flags = from.u32("policy_flags")?;
    let budget = from.u32("budget")?;
    let every = from.u32("every")?;
    let sinks = from.u32("sinks")?;
    let recent = from.u32("recent")?;
    let offset_max = from.u32("offset_max")?;
    let requests = from.count("requests", 1..=4096)?;
    let seed = from.one("seed", u64::from_le_bytes)?;
    let mut recording = Recording {
        query_heads,
        kv_heads,
        head_dim,
        format,
        rope_style,
        scorer,
        selection,
        policy_flags,
        budget,
        every,
        sinks,
        recent,
        offset_max,
        seed,
        inverse_frequencies: from.array(
            "inverse_frequencies",
            rope_dimensions / 2,
            f64::from_le_bytes,
        )?,
        layer_numbers: from.array("layer_numbers", layers, u32::from_le_bytes)?,
        requests: Vec::new(),
    };
    for _ in 0..requests {
        let request = read_request(from, &recording)?;
        recording.requests.push(request);
    }
    Ok(recording)
}

fn read_request(from: &mut Reader, recording: &Recording) -> Result<Request> {
    let prompt_tokens = from.u32("prompt_tokens")?;
    let turns = from.count("turns", 1..=65536)?;
    let mut request = Request {
        prompt_tokens,
        rounds: from.u32("rounds")?,
        seen: from.u32("seen")?,
        retained: from.array("retained", recording.layer_numbers.len(), u32::from_le_bytes)?,
        turns: Vec::new(),
    };
    for _ in 0..turns {
        request.turns.push(read_turn(from, recording)?);
    }
    Ok(request)
}

fn read_turn(from: &mut Reader, recording: &Recording) -> Result<Turn> {
    let rows = from.count("rows", 1..=8192)?;
    let accepted = from.count("accepted", 0..=rows as u32)? as u32;
    let output_rows = from.count("output_rows", 0..=rows as u32)?;
    let token_ids = from.array("token_ids", rows, u32::from_le_bytes)?;
    let mut layers = Vec::new();
    for _ in 0..recording.layer_numbers.len() {
        let (of_queries, of_kv) = (rows * recording.query_size(), rows * recording.kv_size());
        let of_outputs = output_rows * recording.query_size();
        layers.push(LayerRows {
            queries: from.array("queries", of_queries, u16::from_le_bytes)?,
            keys: from.array("keys", of_kv, u16::from_le_bytes)?,
            values: from.array("values", of_kv, u16::from_le_bytes)?,
            outputs: from.array("outputs", of_outputs, f32::from_le_bytes)?,
        });
    }
    Ok(Turn { accepted, output_rows, token_ids, layers })
}
