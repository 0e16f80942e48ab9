//! The batching example: traces whose outputs come from the formula, damaged and hostile ones, and
//! the program itself.

#[path = "../../examples/batching/replay.rs"]
mod replay;
#[path = "../../examples/batching/results.rs"]
mod results;
#[path = "../../examples/batching/trace.rs"]
mod trace;

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::common::*;
use replay::Limits;
use trace::Recording;

const LAYERS: usize = 2;

/// A turn of a made-up request: rows, of which so many are accepted.
type Turns = &'static [(usize, usize)];

/// Prompts in chunks, decode tokens, drafts of which some or none are accepted.
const REQUESTS: [Turns; 3] = [
    &[(16, 16), (5, 5), (1, 1), (4, 2), (3, 0), (1, 1)],
    &[(30, 30), (1, 1), (1, 1)],
    &[(7, 7), (5, 5), (6, 3)],
];

fn accepted(turns: Turns) -> usize {
    turns.iter().map(|turn| turn.1).sum()
}

fn fnv(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(1099511628211);
    bytes.iter().fold(14695981039346656037, step)
}

/// Builds a trace: little-endian numbers one behind the other.
struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, values: &[usize]) {
        self.0.extend(values.iter().flat_map(|&value| (value as u32).to_le_bytes()));
    }

    fn half(&mut self, values: &[f32]) {
        self.0.extend(values.iter().flat_map(|&value| f16_bits(value).to_le_bytes()));
    }

    fn sealed(mut self) -> Vec<u8> {
        let checksum = fnv(&self.0);
        self.0.extend(checksum.to_le_bytes());
        self.0
    }
}

/// The trace, and the checksum that each request's line must show.
fn synthetic() -> (Vec<u8>, Vec<u64>) {
    let mut file = Writer(b"KVTRACE1".to_vec());
    let [f32_format, no_rope, no_scorer] = [1, 0, 0];
    file.u32(&[LAYERS, 4, 2, 32, f32_format, no_rope, 0, no_scorer, 0, 0, 0, 0, 0, 0, 0]);
    file.u32(&[REQUESTS.len(), 0, 0]);
    file.u32(&[3, 17]);
    let mut checksums = Vec::new();
    for (index, turns) in REQUESTS.iter().enumerate() {
        let tokens = accepted(turns);
        file.u32(&[turns[0].1, turns.len(), 0, tokens]);
        file.u32(&[tokens; LAYERS]);
        checksums.push(write_turns(&mut file, index as u64, turns));
    }
    (file.sealed(), checksums)
}

/// Rejected drafts are tokens of another text, which goes on from the accepted ones.
fn write_turns(file: &mut Writer, index: u64, turns: Turns) -> u64 {
    let length = accepted(turns) + 8;
    let truth = Text::new(SHAPE, LAYERS, length, 110 + index);
    let mut drafts = Text::new(SHAPE, LAYERS, length, 120 + index);
    let pool = pool(LAYERS);
    let sequence = sequence(&pool);
    let mut outputs = Vec::new();
    let mut seen = 0;
    for &(rows, accepted) in turns {
        let output_rows = rows.min(3);
        file.u32(&[rows, accepted, output_rows]);
        file.u32(&(seen..seen + rows).collect::<Vec<_>>());
        for layer in 0..LAYERS {
            for (of_drafts, of_truth) in [
                (&mut drafts.keys[layer], truth.keys(layer, 0..seen + accepted)),
                (&mut drafts.values[layer], truth.values(layer, 0..seen + accepted)),
                (&mut drafts.queries[layer], truth.queries(layer, 0..seen + accepted)),
            ] {
                of_drafts[..of_truth.len()].copy_from_slice(of_truth);
            }
        }
        let step = pool.begin_step().unwrap();
        step.append(sequence, rows as u32, None).unwrap();
        step.reserve().unwrap();
        let alone = drafts.pass(&step, seen..seen + rows);
        step.accept(sequence, accepted as u32).unwrap();
        step.end().unwrap();
        for (layer, alone) in alone.iter().enumerate() {
            file.half(drafts.queries(layer, seen..seen + rows));
            file.half(drafts.keys(layer, seen..seen + rows));
            file.half(drafts.values(layer, seen..seen + rows));
            for token in seen + rows - output_rows..seen + rows {
                for head in 0..SHAPE.query_heads {
                    let rule = Rule::default();
                    let (out, _) = drafts.formula(layer, token, head, &causal(token), &rule);
                    file.0.extend(out.iter().flat_map(|&x| (x as f32).to_le_bytes()));
                }
            }
            let shown = &alone[(rows - output_rows) * SHAPE.out_row()..];
            outputs.extend(shown.iter().flat_map(|x| x.to_le_bytes()));
        }
        seen += accepted;
    }
    fnv(&outputs)
}

fn printed(recording: &Recording, limits: Limits) -> String {
    let results = replay::replay(recording, limits).unwrap();
    assert!(results.all_equal());
    let mut text = Vec::new();
    results.print(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn a_batch_gets_what_each_sequence_gets_alone() {
    let _session = Session::new();
    let (file, checksums) = synthetic();
    let recording = Recording::decode(&file).unwrap();
    // A block holds 16 tokens; 2 layers.
    let lines = [
        format!(
            "      0     16    30       5    25       50      0      4 {:016x} equal",
            checksums[0]
        ),
        format!(
            "      1     30    32       0    32       64      0      4 {:016x} equal",
            checksums[1]
        ),
        format!(
            "      2      7    18       3    15       30      0      2 {:016x} equal",
            checksums[2]
        ),
    ];
    let header =
        "request prompt  rows dropped  seen retained rounds blocks checksum         outputs";
    for (slots, steps) in [(1, 12), (2, 6), (3, 6), (9, 6)] {
        for threads in [1, 2] {
            let text = printed(&recording, Limits { slots, arena_mib: 2, threads });
            let found: Vec<&str> = text.lines().collect();
            assert_eq!(found[0], header);
            assert_eq!(found[1..4], lines);
            let totals = format!("steps {steps}, tokens 72, rounds 0, blocks at most ");
            assert!(found[4].starts_with(&totals), "{}", found[4]);
            assert_eq!(found.len(), 5);
        }
    }
}

/// The trace that lies beside the C++ example, recorded from a real model.
fn real_trace() -> PathBuf {
    let golden = std::env::var_os("KVRT_GOLDEN_DIR").expect("KVRT_GOLDEN_DIR must be set");
    PathBuf::from(golden).join("../../../samples/batching/smollm2.trace")
}

#[test]
fn a_real_models_trace_is_replayed() {
    let _session = Session::new();
    let recording = Recording::read(&real_trace()).unwrap();
    let text = printed(&recording, Limits { slots: 3, arena_mib: 8, threads: 1 });
    let alone = printed(&recording, Limits { slots: 1, arena_mib: 8, threads: 1 });
    let requests = |text: &str| text.lines().filter(|l| l.ends_with(" equal")).count();
    assert_eq!(requests(&text), recording.requests.len());
    assert_eq!(requests(&alone), recording.requests.len());
}

#[test]
fn sequences_wait_where_blocks_are_short() {
    let _session = Session::new();
    // 16 requests of 1000 tokens in one layer of f32: 63 blocks of 8192 bytes each. The slab of the
    // pool holds 256 blocks, so that the fifth of five slots waits.
    let text = Text::new(SHAPE, 1, 1000, 130);
    let mut file = Writer(b"KVTRACE1".to_vec());
    file.u32(&[1, 4, 2, 32, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0]);
    for _ in 0..16 {
        file.u32(&[1000, 1, 0, 1000, 1000, 1000, 1000, 0]);
        file.u32(&[0; 1000]);
        file.half(&text.queries[0]);
        file.half(&text.keys[0]);
        file.half(&text.values[0]);
    }
    let recording = Recording::decode(&file.sealed()).unwrap();
    let text = printed(&recording, Limits { slots: 5, arena_mib: 2, threads: 1 });
    let totals =
        "steps 4, tokens 16000, rounds 0, blocks at most 252, returned 1008, bytes returned";
    assert_eq!(text.lines().last(), Some(&*format!("{totals} {}", 1008 * 8192)));
}

/// Decoding must fail, and say so.
fn assert_refused(file: &[u8], words: &str) {
    let error = Recording::decode(file).err().expect("a damaged trace").to_string();
    assert!(error.contains(words), "'{words}' is not in: {error}");
}

fn reseal(file: &[u8]) -> Vec<u8> {
    Writer(file[..file.len() - 8].to_vec()).sealed()
}

#[test]
fn a_damaged_trace_is_refused() {
    let _session = Session::new();
    let (file, _) = synthetic();
    for place in (0..file.len()).step_by(97).chain([8, 9, file.len() - 1]) {
        let mut damaged = file.clone();
        damaged[place] ^= 0x10;
        assert_refused(&damaged, if place < 8 { "KVTRACE1" } else { "checksum" });
    }
    for length in (0..file.len()).step_by(89).chain(0..20) {
        assert!(Recording::decode(&file[..length]).is_err(), "cut to {length}");
        if length > 16 {
            let cut = Writer(file[..length].to_vec()).sealed();
            assert!(Recording::decode(&cut).is_err(), "cut to {length} and sealed");
        }
    }
    let longer = Writer([&file[..file.len() - 8], &[0; 3]].concat()).sealed();
    assert_refused(&longer, "3 bytes lie behind");
    assert_refused(b"", "KVTRACE1");
    assert_refused(b"KVTRACE1", "KVTRACE1");
    assert_refused(&Writer(b"KVTRACE1".to_vec()).sealed(), "the file ends within layers");
}

#[test]
fn hostile_numbers_are_refused_before_anything_is_allocated_by_them() {
    let _session = Session::new();
    let (file, _) = synthetic();
    // Byte offsets of numbers in the file: the header, then the first request and its first turn.
    let numbers: [(usize, &[u32], &str); 12] = [
        (8, &[0, 65, u32::MAX], "layers is"),
        (12, &[0, 1025, u32::MAX], "query_heads is"),
        (12, &[3], "query_heads is 3, no multiple of kv_heads 2"),
        (16, &[0, u32::MAX], "kv_heads is"),
        (20, &[0, 24, 264, u32::MAX], "head_dim is"),
        (20, &[36], "head_dim is 36, it must be a multiple of 8"),
        (32, &[2, 33, u32::MAX], "rope_dimensions is"),
        (68, &[0, 4097, u32::MAX], "requests is"),
        (92, &[0, 65537, u32::MAX], "turns is"),
        (112, &[0, 8193, u32::MAX], "rows is"),
        (116, &[17, u32::MAX], "accepted is"),
        (120, &[17, u32::MAX], "output_rows is"),
    ];
    for (place, values, words) in numbers {
        for value in values {
            let mut hostile = file.clone();
            hostile[place..place + 4].copy_from_slice(&value.to_le_bytes());
            assert_refused(&reseal(&hostile), words);
        }
    }
    // The largest numbers that the bounds allow, of which the file holds none.
    for (place, value) in [(8, 64), (12, 1024), (20, 256), (68, 4096), (92, 65536), (112, 8192)] {
        let mut hostile = file.clone();
        hostile[place..place + 4].copy_from_slice(&u32::to_le_bytes(value));
        assert!(Recording::decode(&reseal(&hostile)).is_err(), "{place}");
    }
    // Whatever byte is wrong, reading ends with an answer.
    for place in 8..400 {
        let mut hostile = file.clone();
        hostile[place] ^= 0xff;
        let _ = Recording::decode(&reseal(&hostile));
    }
}

#[test]
fn what_the_library_refuses_is_an_error_of_the_replay() {
    let _session = Session::new();
    let (file, _) = synthetic();
    for (place, value, words) in [(24, 99, "key_format is 99"), (36, 99, "scorer")] {
        let mut other = file.clone();
        other[place] = value;
        let recording = Recording::decode(&reseal(&other)).unwrap();
        let limits = Limits { slots: 3, arena_mib: 2, threads: 1 };
        let error = replay::replay(&recording, limits).err().expect("a refusal").to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn other_outputs_or_another_end_are_different() {
    let _session = Session::new();
    let (file, _) = synthetic();
    let limits = Limits { slots: 3, arena_mib: 2, threads: 1 };
    // seen of the first request; the highest bit of the fraction of a recorded output, the last
    // number of the file: it changes by a quarter or more.
    for place in [100, file.len() - 10] {
        let mut other = file.clone();
        other[place] ^= 0x40;
        let recording = Recording::decode(&reseal(&other)).unwrap();
        let results = replay::replay(&recording, limits).unwrap();
        assert!(!results.all_equal());
        let mut text = Vec::new();
        results.print(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(text.matches(" DIFFERENT\n").count(), 1, "{text}");
    }
}

/// The program, which cargo builds beside the tests.
fn program(arguments: &[&str]) -> Output {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().unwrap().parent().unwrap().join("examples/batching");
    let error = |error| panic!("{}: {error}", program.display());
    Command::new(&program).args(arguments).output().unwrap_or_else(error)
}

#[test]
fn the_programs_exit_status_says_how_it_went() {
    let trace = real_trace();
    let trace = trace.to_str().unwrap();
    let all_equal = program(&[trace, "--slots", "4", "--arena-mib", "2", "--threads", "2"]);
    assert_eq!(all_equal.status.code(), Some(0));
    assert!(all_equal.stderr.is_empty() && !all_equal.stdout.is_empty());
    for (arguments, status, words) in [
        (&[][..], 2, "give the path of a trace"),
        (&[trace, trace], 2, "one trace"),
        (&[""], 2, "one trace"),
        (&[trace, "--slots"], 2, "--slots needs a value"),
        (&[trace, "--slots", "0"], 2, "a number from 1 to 4096"),
        (&[trace, "--slots", "x"], 2, "a number from 1 to 4096"),
        (&[trace, "--arena-mib", "1"], 2, "a number from 2 to 131072"),
        (&[trace, "--threads", "257"], 2, "a number from 1 to 256"),
        (&[trace, "--help"], 2, "'--help' is not an option"),
        (&["/nonexistent/trace"], 1, "'/nonexistent/trace'"),
        (&["/dev/zero"], 1, "not a regular file"),
        (&["/"], 1, "not a regular file"),
    ] {
        let output = program(arguments);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.starts_with("batching: ") && said.contains(words), "{said}");
        assert_eq!(said.contains("usage:"), status == 2);
    }
}
